"""What the papers' names of models are on the hub."""

from __future__ import annotations

# The names of Huang et al. (2021), WhiteningBERT; those that the paper does not spell out are what
# its repository evaluates. LaBSE is the plain encoder, without the head of sentence-transformers.
PRETRAINED = {
    "BERT-base": "bert-base-uncased",
    "RoBERTa-base": "roberta-base",
    "SpanBERT-base": "SpanBERT/spanbert-base-cased",
    "DeBERTa-base": "microsoft/deberta-base",
    "ALBERT-base": "albert-base-v1",
    "T5-base": "t5-base",
    "LayoutLM-base": "microsoft/layoutlm-base-uncased",
    "XLM-base": "xlm-mlm-tlm-xnli15-1024",
    "DistilBERT": "distilbert-base-uncased",
    "M-BERT": "bert-base-multilingual-uncased",
    "MPNet": "microsoft/mpnet-base",
    "SqueezeBERT": "squeezebert/squeezebert-uncased",
    "LaBSE": "setu4993/LaBSE",
    "SPECTER": "allenai/specter",
    "MiniLM": "microsoft/MiniLM-L12-H384-uncased",
    "BERT-large": "bert-large-uncased",
    "RoBERTa-large": "roberta-large",
    "SpanBERT-large": "SpanBERT/spanbert-large-cased",
    "DeBERTa-large": "microsoft/deberta-large",
    "ALBERT-large": "albert-large-v1",
    "T5-large": "t5-large",
    "LayoutLM-large": "microsoft/layoutlm-large-uncased",
    "XLM-large": "xlm-mlm-en-2048",
    "DialogRPT": "microsoft/DialogRPT-human-vs-rand",
}
# Which checkpoint these were is said neither in the paper nor in its repository.
UNSURE = ("XLM-base", "XLM-large", "MiniLM")
# Layers L of those whose layers the paper names by number.
DEPTHS = {"BERT-base": 12, "RoBERTa-base": 12, "DistilBERT": 6, "LaBSE": 12}
_PLAIN = {"bert": "bert-{}-uncased", "roberta": "roberta-{}"}


def plain(family: str, size: str) -> str:
    """Return the hub's name of BERT or RoBERTa, ``base`` or ``large``."""
    return _PLAIN[family].format(size)


def nli_trained(family: str, size: str) -> str:
    """Return the hub's name of SBERT or SRoBERTa trained on NLI."""
    return f"sentence-transformers/{family}-{size}-nli-mean-tokens"


def unsupervised_simcse(family: str, size: str) -> str:
    """Return the hub's name of unsupervised SimCSE."""
    return f"princeton-nlp/unsup-simcse-{plain(family, size)}"


def whitened_cse(size: str) -> str:
    """Return the name that WhitenedCSE's authors give their BERT, ``base`` or ``large``."""
    return f"SupstarZh/whitenedcse-bert-{size}"


def short(name: str) -> str:
    """Return a model's name or folder without its owner: what one model is known by anywhere."""
    return name.rstrip("/").rsplit("/", 1)[-1].lower()
