"""verl: the words of its SFT trainer on Megatron-Core, written and read, and those of an actor, read."""
