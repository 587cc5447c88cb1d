"""The tables of docs/scaling.md: rates, bytes, memory, hours and money, limits."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.results_file import read
from benchmarks.scaling_limits import ID_BYTES, Limit, limits, remedies
from benchmarks.scaling_model import CODECS, Cluster, Plan, hours, money, money_apart, stages
from benchmarks.scaling_rates import SHARD_ROWS, Figure, Rates

SIZES = (10_000_000, 100_000_000, 1_000_000_000)
# Machines tried for each size, of two cores and with a GPU.
CPU_MACHINES, GPU_MACHINES = (8, 64, 512), (1, 8, 64)
_GB, _MIB = 1e9, 1 << 20
_WORTH_SAYING = 0.6


def rates() -> str:
    """Return every rate the model stands on, with where it comes from."""
    lines = ["| | | source |", "|---|---:|---|"]
    for figure in Rates.read().figures():
        words, value = figure.words, figure.value
        for unit, shown, times in (("s a row", "µs a row", 1e6), ("bytes/s", "MB/s", 1e-6)):
            if words.startswith(unit):
                words, value = shown + words.removeprefix(unit), value * times
        lines.append(f"| {words} | {_number(value)} | {_source(figure)} |")
    return "\n".join(lines)


def data() -> str:
    """Return the bytes of each artifact, a row and for each size."""
    known = Rates.read()
    plan = Plan(rows=SIZES[0])
    rows: list[tuple[str, float]] = [
        ("texts, Parquet, as Wikinews by its tokens", known.corpus_row.value),
        ("store: float16 embeddings of 384 dims, digests, ids, moments", known.stored_row.value),
        ("of these, moments: one triangle a shard", plan.moments_bytes / SHARD_ROWS),
    ]
    for codec, coordinate in CODECS.items():
        a_row = plan.k * coordinate + known.index_extra_row.value
        rows.append((f"index, k = {plan.k}, {codec}", a_row))
    rows.append(("documents, an id alone", known.documents_row.value))
    sizes = " | ".join(f"{_rows(size)}, GB" for size in SIZES)
    lines = [f"| | bytes a row | {sizes} |", "|---|---:|" + "---:|" * len(SIZES)]
    for name, a_row in rows:
        totals = " | ".join(_number(a_row * size / _GB) for size in SIZES)
        lines.append(f"| {name} | {_number(a_row)} | {totals} |")
    return "\n".join(lines)


def memory() -> str:
    """Return what each role holds, for each size."""
    known = Rates.read()
    plans = [Plan(rows=size) for size in SIZES]
    process, coder = known.process_mib.value, known.coder_mib.value

    def each(of: Callable[[Plan], float]) -> list[float]:
        return [of(plan) for plan in plans]

    roles: list[tuple[str, str, list[float]]] = [
        (
            "head: ids checked, 16 bytes a row for a while",
            "arithmetic",
            each(lambda plan: process + ID_BYTES * plan.rows / _MIB),
        ),
        ("worker that encodes, on a CPU", "measured", each(lambda _: known.worker_mib.value)),
        (
            "worker that adds moments up: two of them, and a whole matrix",
            "arithmetic",
            each(lambda plan: process + (2 * plan.moments_bytes + 8 * plan.dim**2) / _MIB),
        ),
        (
            "worker that trains: the sample, and the copy of it that its clustering makes",
            "arithmetic",
            each(lambda plan: process + 8 * plan.k * plan.sample / _MIB),
        ),
        (
            "worker that codes, `--memory-budget 256MiB`, and the centroids",
            "measured, and arithmetic",
            each(lambda plan: process + coder + 4 * plan.k * plan.lists / _MIB),
        ),
    ]
    if known.driver_mib is not None:
        found = known.driver_mib
        roles.insert(1, (f"head: {found.words}", "measured", each(lambda _: found.value)))
    sizes = " | ".join(f"{_rows(size)}, MiB" for size in SIZES)
    lines = [f"| | | {sizes} |", "|---|---|" + "---:|" * len(SIZES)]
    for name, how, values in roles:
        lines.append(f"| {name} | {how} | {' | '.join(f'{value:,.0f}' for value in values)} |")
    return "\n".join(lines)


def steps() -> str:
    """Return the stages of each size on machines with a GPU: seconds, bytes, what they wait for."""
    known = Rates.read()
    titles = [
        f"{_rows(size)} on {machines}" for size, machines in zip(SIZES, GPU_MACHINES, strict=True)
    ]
    columns = [
        stages(Plan(rows=size), Cluster(machines=machines, gpu=True), known)
        for size, machines in zip(SIZES, GPU_MACHINES, strict=True)
    ]
    lines = [
        f"| seconds | {' | '.join(titles)} | machines | read, GB | written, GB | waits for |",
        "|---|" + "---:|" * (len(SIZES) + 3) + "---|",
    ]
    for row in zip(*columns, strict=True):
        last = row[-1]
        seconds = " | ".join(f"{stage.seconds:,.0f}" for stage in row)
        lines.append(
            f"| {last.name} | {seconds} | {'one' if last.machines == 1 else 'all'} "
            f"| {_number(last.read / _GB)} | {_number(last.written / _GB)} | {last.bound} |"
        )
    return "\n".join(lines)


def plans() -> str:
    """Return machines, hours and money for each size."""
    known = Rates.read()
    one = Cluster(machines=1)
    lines = [
        "| rows | machines | $ an hour each | hours encoding | hours in all | $ "
        "| $, GPUs sent home after encoding | $ at half the GPU's rate |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for size, cores, gpus in zip(SIZES, CPU_MACHINES, GPU_MACHINES, strict=True):
        plan = Plan(rows=size)
        for cluster in (Cluster(machines=cores), Cluster(machines=gpus, gpu=True)):
            found = stages(plan, cluster, known)
            encode = hours([stage for stage in found if stage.name == "encode"])
            apart = slow = "–"
            if cluster.gpu:
                apart = f"{money_apart(plan, cluster, known):,.2f}"
                slower = hours(found) + encode
                slow = f"{slower * (cluster.machines * cluster.price + one.cpu_price):,.2f}"
            name = "one GPU" if cluster.gpu else "two cores"
            lines.append(
                f"| {_rows(size)} | {cluster.machines} of {name} | {cluster.price:.2f} "
                f"| {encode:,.2f} | {hours(found):,.2f} | {money(found, cluster):,.2f} "
                f"| {apart} | {slow} |"
            )
    return "\n".join(lines)


def breaks() -> str:
    """Return what each size comes up against on machines with a GPU, the worst first."""
    known = Rates.read()
    lines = ["| | needs | has | of it | what to do then |", "|---|---:|---:|---:|---|"]
    for size, machines in zip(SIZES, GPU_MACHINES, strict=True):
        cluster = Cluster(machines=machines, gpu=True)
        lines.append(f"| **{_rows(size)} rows, {machines} × one GPU** | | | | |")
        lines += map(_limit, limits(Plan(rows=size), cluster, known))
    return "\n".join(lines)


def mended() -> str:
    """Return what the largest size becomes by what can be done about its limits."""
    plan, machines = Plan(rows=SIZES[-1]), GPU_MACHINES[-1]
    lines = [
        f"| {_rows(plan.rows)} rows, {machines} × one GPU | hours | $ | index, GB |",
        "|---|---:|---:|---:|",
    ]
    for remedy in remedies(plan, Cluster(machines=machines, gpu=True), Rates.read()):
        lines.append(
            f"| {remedy.what} | {remedy.hours:.2f} | {remedy.money:,.2f} | {remedy.index_gb:,.0f} |"
        )
    return "\n".join(lines)


def empty() -> str:
    """Return what the driver takes for shards that have nothing in them."""
    lines = ["| shards | seconds | µs a shard | MiB of the driver |", "|---:|---:|---:|---:|"]
    for row in read("cluster_empty"):
        micros = 1e6 * row["seconds"] / row["shards"]
        lines.append(
            f"| {row['shards']:,} | {row['seconds']:,.1f} | {micros:,.0f} "
            f"| {row['driver_mib']:,.0f} |"
        )
    return "\n".join(lines)


def equal() -> str:
    """Return how a build on a cluster compares with one of this machine."""
    names = {"column": "Wikinews, by embedding column", "texts": "Wikinews, encoded by MiniLM"}
    lines = [
        "| built both ways | rows | index | shards, ids | moments apart | least cosine | file |",
        "|---|---:|---|---|---:|---:|---|",
    ]
    for row in read("cluster_equal"):
        same = "the same" if row["same_shards"] and row["same_ids"] else "**others**"
        file = "the same to the byte"
        if not row["same_index"]:
            same_list, cosine = row["rows_in_the_same_list"], row["least_vector_cosine"]
            file = f"{same_list:.2%} of rows in the same list, vectors' cosine ≥ {cosine:.7f}"
        lines.append(
            f"| {names[row['kind']]} | {row['rows']:,} | {row['factory']} | {same} "
            f"| {row['moments_apart']:.1e} | {row['least_cosine']:.8f} | {file} |"
        )
    return "\n".join(lines)


def _limit(limit: Limit) -> str:
    unit = f" {limit.unit}".rstrip()
    return (
        f"| {limit.what} | {_number(limit.asked)}{unit} | {_number(limit.there)}{unit} "
        f"| {limit.share:.0%} | {limit.then if limit.share > _WORTH_SAYING else ''} |"
    )


def _source(figure: Figure) -> str:
    if not figure.measured:
        return f"**published, not measured**: {figure.source}"
    return "measured: " + ", ".join(f"`{name.strip()}`" for name in figure.source.split(","))


def _number(value: float) -> str:
    """Three digits that say something."""
    if value == 0:
        return "0"
    if abs(value) < 0.001:
        return f"{value:.2e}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _rows(size: int) -> str:
    return f"{size // 10**9}B" if size >= 10**9 else f"{size // 10**6}M"


TABLES: dict[str, Callable[[], str]] = {
    "scaling_rates": rates,
    "scaling_bytes": data,
    "scaling_memory": memory,
    "scaling_stages": steps,
    "scaling_plans": plans,
    "scaling_limits": breaks,
    "scaling_remedies": mended,
    "cluster_empty": empty,
    "cluster_equal": equal,
}
