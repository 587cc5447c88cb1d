"""What each row of the papers' tables asks for: a system, and how its figures are computed.

Where the sources differ (Keras and PyTorch ports, SentEval, WhiteningBERT's repository):

- BERT-whitening: 64 tokens, layers 1 and L, fitted on all splits of a set, weighted mean.
- WhiteningBERT: 128 tokens, fitted on what is scored, mean over the subsets.
- WhitenedCSE quotes SimCSE's evaluation: no limit of tokens, all pairs of a set together. Its
  first-last average of 2021 was that of the embedding layer and the last. Its BERT-whitening is
  that of the paper fitted on NLI, all directions kept: on STS-B and SICK-R, which have no subsets,
  its figures are those of that row but for 0.1, and far from the rows of the target.
- SBERT's own figures (GloVe, BERT, SBERT-NLI): last layer, 128 tokens, all pairs together.

SICK-R is scored on its test split by all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from pipelines.papers import models
from pipelines.papers.published import Row
from pipelines.papers.recipes import (
    BERT_WHITENING,
    EMBEDDING_LAST,
    FIRST_LAST,
    HUANG,
    SU,
    TORCH_PORT,
    WHITENED_CSE,
    WHITENING_BERT,
    Kind,
    Measure,
    Recipe,
    Refusal,
    Setting,
)
from whiten_index.measure.measure_options import SCORED

_SBERT_TOKENS = 128


def recipe_of(row: Row) -> Recipe | Refusal:
    """Return what computes a row, or why nothing here does."""
    reader = _SOURCES.get(row.source)
    found = None if reader is None else reader(row)
    if found is not None:
        return found
    return Refusal(
        f"no setting of this job is called {row.model!r}, {row.setting!r} in {row.source}, "
        f"{row.table}"
    )


# --------------------------------------------------------------------------- BERT-whitening

_NO_FLOW = Refusal("BERT-flow trains a normalising flow on the sentences; this project has none")
_QUOTED = "quoted from Reimers and Gurevych (2019), whose figures are of all pairs together"
_BY_LI = "quoted from Li et al. (2020)"
_SBERT = Setting(max_length=_SBERT_TOKENS)
_GLOVE = Recipe(Kind.WORDS, None, Setting(), (_QUOTED,))
_BASELINES: dict[str, Recipe | Refusal] = {
    "Avg. GloVe embeddings": _GLOVE,
    "Avg. BERT embeddings": Recipe(Kind.ENCODER, models.plain("bert", "base"), _SBERT, (_QUOTED,)),
    "BERT CLS-vector": Recipe(
        Kind.ENCODER, models.plain("bert", "base"), replace(_SBERT, pooling="cls"), (_QUOTED,)
    ),
    "InferSent - GloVe": Refusal(
        "InferSent is an LSTM over GloVe, trained on NLI; this project runs Transformers and "
        "averages of word vectors"
    ),
    "USE": Refusal(
        "the Universal Sentence Encoder is published for TensorFlow only; this project runs "
        "Transformers of the Hugging Face hub"
    ),
}
_SU_MODEL = re.compile(
    r"(?P<family>BERT|SBERT|SRoBERTa)(?P<size>base|large)(?P<nli>-NLI)?"
    r"(-(?P<what>first-last-avg|whitening|flow)(-(?P<k>\d+))?( \((?P<fit>NLI|target)\))?)?"
)


def _bert_whitening(row: Row) -> Recipe | Refusal | None:
    if row.model in _BASELINES:
        return _BASELINES[row.model]
    found = _SU_MODEL.fullmatch(row.model)
    if found is None:
        return None
    if found["what"] == "flow":
        return _NO_FLOW
    family = "roberta" if "RoBERTa" in found["family"] else "bert"
    name = models.nli_trained if found["nli"] else models.plain
    hub, notes = name(family, found["size"]), ((_BY_LI,) if "Li et al." in row.setting else ())
    if found["what"] is None:
        # SBERT as published: its last layer, its own limit.
        return Recipe(Kind.ENCODER, hub, _SBERT, (_QUOTED,)) if found["nli"] else None
    if found["what"] == "first-last-avg":
        return Recipe(Kind.ENCODER, hub, SU, notes)
    if found["fit"] is None:
        return None
    k = int(found["k"]) if found["k"] else "full"
    return Recipe(Kind.ENCODER, hub, replace(SU, k=k, fit=found["fit"].lower()), notes)


# --------------------------------------------------------------------------- its PyTorch port

_PORT_MODEL = re.compile(
    r"BERT(?P<size>base|large)-(first_last_avg|whiten(-(?P<k>\d+))?\((?P<fit>nli|target)\))"
)
_EXACT = "exact search in the place of IVF1024 with 5 probes, whose recall the published figure has"
_MEASURED_THERE = {
    "ms_per_query": "milliseconds of another machine; benchmarks/ measures this one's",
    "gigabytes": "bytes of the array of vectors alone, n × k × 4; no evaluation is needed for them",
}


def _torch_port(row: Row) -> Recipe | Refusal | None:
    if row.metric in _MEASURED_THERE:
        return Refusal(_MEASURED_THERE[row.metric])
    found = _PORT_MODEL.fullmatch(row.model)
    if found is None or row.metric != "mrr@10":
        return None
    if found["fit"] == "nli":
        return Refusal(
            "not implemented here: retrieval searches indexes as a build makes them, fitted on "
            "their own corpus"
        )
    k = None if found["fit"] is None else int(found["k"]) if found["k"] else "full"
    setting = replace(SU, measure=Measure.RETRIEVAL, k=k)
    return Recipe(Kind.ENCODER, models.plain("bert", found["size"]), setting, (_EXACT,))


# --------------------------------------------------------------------------- WhiteningBERT

_PEARSON = "Arora et al. (2017) print Pearson's correlation; ours is Spearman's, as the table says"
_HUANG_SETTING = re.compile(
    r"token=(?P<token>CLS|AVG), layer=(?P<layers>first\+last|L\d+(\+L\d+)*), "
    r"whitening=(?P<whitening>[TF])"
)
_OTHERS: dict[str, Recipe | Refusal] = {
    "Avg. GloVe": _GLOVE,
    "SIF": Recipe(Kind.WORDS, None, Setting(sif=True, aggregation="mean"), (_PEARSON,)),
    "IS-BERT": Refusal("IS-BERT is trained on NLI sentences; its training is not in this project"),
    "BERT-flow": _NO_FLOW,
    "SBERT WK": Refusal(
        "SBERT-WK weighs words and layers by their geometry in every sentence; this project has no "
        "such pooling"
    ),
}
# Dev alone has fewer sentences than BERT has dimensions: all of them, whitened, are orthogonal.
_RTE_FIT = "fitted on the sentences of train and dev: those of dev alone are fewer than dimensions"


def _whitening_bert(row: Row) -> Recipe | Refusal | None:
    if row.table == "Table 3":
        return _entailment(row)
    if row.model == "baseline":
        return next(
            (found for name, found in _OTHERS.items() if row.setting.startswith(name)), None
        )
    found, hub = _HUANG_SETTING.fullmatch(row.setting), models.PRETRAINED.get(row.model)
    if found is None or hub is None:
        return None
    whitened = found["whitening"] == "T"
    setting = replace(
        HUANG,
        pooling="cls" if found["token"] == "CLS" else "mean",
        layers=_layers(found["layers"], models.DEPTHS.get(row.model)),
        k="full" if whitened else None,
        fit=SCORED if whitened else "target",
    )
    unsure = (f"the paper does not say which checkpoint; {hub} is taken",)
    return Recipe(Kind.ENCODER, hub, setting, unsure if row.model in models.UNSURE else ())


def _layers(text: str, depth: int | None) -> tuple[int, ...]:
    """Return layers such as ``L1+L12``, the model's last one as -1."""
    if text == "first+last":
        return FIRST_LAST
    numbers = [int(part[1:]) for part in text.split("+")]
    return tuple(-1 if number == depth else number for number in numbers)


def _entailment(row: Row) -> Recipe | Refusal | None:
    if row.model.startswith("GPT-3"):
        return Refusal("GPT-3's weights are not public; its figures are of prompts, zero-shot")
    if row.model != "whiteningBERT (PLM=BERT)":
        return None
    setting = replace(HUANG, measure=Measure.RTE, layers=FIRST_LAST, k="full")
    return Recipe(Kind.ENCODER, models.PRETRAINED["BERT-base"], setting, (_RTE_FIT,))


# --------------------------------------------------------------------------- WhitenedCSE

_NEEDS_TRAINING = Refusal(
    "a variant trained by WhitenedCSE, of which no checkpoint is known to be public; train it with "
    "pipelines.train_whitenedcse --keep-models, and give its folder with --trained"
)
_TRAINED_ELSEWHERE = {
    "isbert": "IS-BERT", "ctbert": "CT-BERT", "consert": "ConSERT", "dclr": "DCLR",
    "arccse": "ArcCSE", "declutr": "DeCLUTR", "mocose": "MoCoSE", "skipthought": "Skip-thought",
}  # fmt: skip
_EMBEDDING_LAYER = (
    "SimCSE's first-last average of 2021 took the embedding layer for the first (mended in January "
    "2022)"
)
_FIT_BY_NLI = {
    "bert": "taken to be BERT-whitening's own setting fitted on NLI, whose STS-B and SICK-R these "
    "are but for 0.05 and 0.13",
    "roberta": "taken to be BERT-whitening's setting fitted on NLI, as for BERT; that paper has no "
    "row of RoBERTa to check it by",
}
_CSE_MODEL = re.compile(r"(?P<family>bert|roberta)(?P<size>base|large)(?P<what>.*)")
_OWN = re.compile(r"whitenedcsebert(?P<size>base|large)")
# The rows of its ablations that are the final model again.
_FINAL = (
    "Shuffled-Group-whitening",
    "group size k=384, shuffled",
    "positives m=3",
    "WhitenedCSE-BERT-base",
)
_SIMCSE = re.compile(r"simcse(?P<family>bert|roberta)(?P<size>base|large)")
_LAST_BERT = ("avgbertembeddings", "bertclsembedding")


def _whitened_cse(row: Row) -> Recipe | Refusal | None:
    if row.table not in ("Table 1", "Table 2"):
        return _trained_variant(row)
    measure = Measure.TRANSFER if row.table == "Table 2" else Measure.STS
    name = re.sub(r"[^a-z0-9]", "", row.model.lower())
    if name.startswith("glove"):
        quoted = (_QUOTED,) if measure is Measure.STS else ()
        return Recipe(Kind.WORDS, None, Setting(measure=measure), quoted)
    if found := _OWN.fullmatch(name):
        return _whitened_cse_itself(found["size"], measure)
    if name.startswith("whitenedcse"):
        return _NEEDS_TRAINING
    for start, title in _TRAINED_ELSEWHERE.items():
        if name.startswith(start):
            return Refusal(f"{title} is a trained system; this job runs none of its checkpoints")
    if found := _SIMCSE.fullmatch(name):
        return _simcse(found["family"], found["size"], measure)
    if name in _LAST_BERT and measure is Measure.TRANSFER:
        pooling = "cls" if "cls" in name else "mean"
        setting = Setting(measure=measure, pooling=pooling)
        return Recipe(Kind.ENCODER, models.plain("bert", "base"), setting)
    found = _CSE_MODEL.fullmatch(name)
    return None if found is None else _untrained(found)


def _untrained(found: re.Match[str]) -> Recipe | Refusal | None:
    hub = models.plain(found["family"], found["size"])
    if found["what"] == "firstlastavg":
        return Recipe(Kind.ENCODER, hub, Setting(layers=EMBEDDING_LAST), (_EMBEDDING_LAYER,))
    if found["what"] == "whitening":
        whitened = replace(SU, k="full", fit="nli", aggregation="all")
        return Recipe(Kind.ENCODER, hub, whitened, (_FIT_BY_NLI[found["family"]],))
    return _NO_FLOW if found["what"] == "flow" else None


def _trained_variant(row: Row) -> Recipe | Refusal:
    if "unsup. SimCSE" in row.setting or row.setting == "SimCSE-BERT-base":
        return _simcse("bert", "base", Measure.STS)
    if row.setting in _FINAL:
        return _whitened_cse_itself("base", Measure.STS)
    return _NEEDS_TRAINING


def _whitened_cse_itself(size: str, measure: Measure) -> Recipe:
    setting = Setting(measure=measure, pooling="cls")
    return Recipe(Kind.TRAINED, models.whitened_cse(size), setting)


def _simcse(family: str, size: str, measure: Measure) -> Recipe:
    hub = models.unsupervised_simcse(family, size)
    return Recipe(Kind.TRAINED, hub, Setting(measure=measure, pooling="cls"))


_SOURCES: dict[str, Callable[[Row], Recipe | Refusal | None]] = {
    BERT_WHITENING: _bert_whitening,
    TORCH_PORT: _torch_port,
    WHITENING_BERT: _whitening_bert,
    WHITENED_CSE: _whitened_cse,
}
