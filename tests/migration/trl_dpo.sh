# Full training
accelerate launch --num_processes 8 trl/scripts/dpo.py \
    --dataset_name data/ultrafeedback_binarized.jsonl \
    --model_name_or_path configs/models/qwen2_1.5b \
    --learning_rate 5.0e-7 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 2 \
    --max_steps 1000 \
    --gradient_accumulation_steps 8 \
    --eval_strategy steps \
    --eval_steps 50 \
    --output_dir runs/Qwen2-1.5B-DPO \
    --no_remove_unused_columns
