"""`vllm-ula doctor`: why UlaCache would not run here, before a model is loaded."""
