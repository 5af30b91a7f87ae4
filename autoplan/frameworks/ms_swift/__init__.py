"""ms-swift: scripts of its two commands, `megatron` on Megatron-Core and `swift` on transformers' Trainer."""
