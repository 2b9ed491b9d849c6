"""The engine for Inferentia2 and Trainium, through transformers-neuronx."""
