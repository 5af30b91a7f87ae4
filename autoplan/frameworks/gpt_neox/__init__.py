"""GPT-NeoX, which runs Megatron-LM's layers on DeepSpeed."""
