"""Evaluation: perplexity, multiple choice, cloze tasks and lm-eval."""
