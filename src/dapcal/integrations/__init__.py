"""Where other people's training and serving ends: `lightning`, `huggingface` and `mlflow`, each behind its library."""
