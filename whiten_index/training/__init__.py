"""Contrastive training with shuffled group whitening (WhitenedCSE), and SimCSE as its baseline."""
