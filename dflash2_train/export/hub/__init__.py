"""The Hugging Face Hub: putting an exported drafter there and fetching one, whole or not at all."""
