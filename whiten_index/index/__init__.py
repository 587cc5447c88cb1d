"""FAISS: choose, build, tune and search an index. The only importer of faiss."""
