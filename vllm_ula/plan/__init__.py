"""`vllm-ula plan`: what fits, before any GPU is rented. Arithmetic alone, from `capacity/`."""
