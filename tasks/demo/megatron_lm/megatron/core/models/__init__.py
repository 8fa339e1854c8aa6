"""Models in Megatron's fused layout."""
