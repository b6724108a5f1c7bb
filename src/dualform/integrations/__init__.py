"""Recording within training frameworks: `transformers` (Trainer, TRL's SFTTrainer), `accelerate`, `lightning`. None is imported before it is used."""
