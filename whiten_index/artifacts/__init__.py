"""Files on disk: looking and listing, atomic writes, manifests, tensors and locks."""
