"""What embeddings and vectors are worth, measured on arrays. numpy, scikit-learn where needed."""
