"""GRPO on mathematics, in TRL's own Python."""

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

model_id = "configs/models/qwen2_1.5b"
dataset = load_dataset("trl-lib/DeepMath-103K", split="train")


def main():
    training_args = GRPOConfig(
        output_dir="runs/Qwen2-GRPO",
        learning_rate=1e-5,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=256,
        loss_type="cispo",
        epsilon_high=5.0,
        use_vllm=True,
        logging_steps=10,
        run_name=f"grpo-{model_id}",
        report_to=["tensorboard"],
    )
    trainer = GRPOTrainer(
        model=model_id,
        reward_funcs=accuracy_reward,
        args=training_args,
        train_dataset=dataset,
        peft_config=LoraConfig(r=16),
    )
    trainer.train()


if __name__ == "__main__":
    main()
