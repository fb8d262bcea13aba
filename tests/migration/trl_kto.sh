#!/bin/bash
MODEL=configs/models/qwen2_1.5b
EXTRA="--lr_scheduler_type=cosine --warmup_steps 0.1"
pip install --upgrade trl
python trl/scripts/kto.py \
    --dataset_name trl-lib/kto-mix-14k \
    --model_name_or_path=$MODEL \
    --per_device_train_batch_size 16 \
    --num_train_epochs 1 \
    --learning_rate 5e-7 \
    $EXTRA \
    --gradient_accumulation_steps 1 \
    --eval_steps 500 \
    --output_dir=runs/kto-aligned-model \
    --logging_first_step > kto.log 2>&1
