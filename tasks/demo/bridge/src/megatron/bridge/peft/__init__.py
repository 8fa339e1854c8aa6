"""Parameter-efficient fine-tuning."""
