"""Raw embeddings on disk: what is encoded is kept, and found again by its texts."""
