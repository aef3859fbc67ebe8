"""Evaluation of a trained model: likelihoods, tasks, and the door of lm-evaluation-harness."""
