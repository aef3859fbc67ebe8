"""Text generation with a trained model."""
