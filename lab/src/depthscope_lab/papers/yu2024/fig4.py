"""Yu & Zhang 2024, Fig. 4: a pre-norm model still grows similar, slowly, because its trunk outgrows attention.

Left: t_sim of pre-norm and, with the same weights, of post-norm, with the odds that `theory.pre_norm_odds`
predicts. Right: ‖X‖_F, ‖X̂‖_F and ‖P(X̂)X̂W‖_F of eq. 19. The setting is that of Fig. 2, with more blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from depthscope.drawing import BLACK, BLUE, GREEN, ORANGE, VERMILION, legend_below, panels
from depthscope.measures import ALIKE, EQUAL, frobenius_norm, token_similarity
from depthscope.progress import Share
from depthscope.theory import expected_pre_norm_energy, pre_norm_exponent, pre_norm_odds, similarity_of, token_odds
from depthscope_lab.papers.simulation.blocks import post_norm_block, pre_norm_block
from depthscope_lab.papers.simulation.weights import Size
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, Work, axis, judge, line, table

CHUNK = 16  # trials at a time: their weights are 0.2 GB


@dataclass(frozen=True)
class Config(Size):
    trials: int = 8
    depth: int = 100
    post_norm_depth: int = 30  # post-norm is finished by then


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """One row per trial and block: block 0 is the input, and what happens in block b stands in row b.

    `predicted_similarity` is t_sim by our map, the same for all trials of a block.
    """
    parts, frames = config.parts(CHUNK), []
    work = Work(len(parts) * config.depth, progress)
    for part, trials in parts:
        sampler = config.sampler("theorem", trials, 4, part, 0)
        pre = post = config.start(trials, 4, part, 1)
        places = {"trial": range(part * CHUNK, part * CHUNK + trials)}
        row = _state(pre) | {"post_norm_similarity": token_similarity(post)}
        frames.append(table(row, block=[0], **places))
        for block in range(1, config.depth + 1):
            weights = sampler.draw()
            at = pre_norm_block(weights, pre, heads=config.heads)
            row = {
                "input_norm": frobenius_norm(pre),
                "normed_norm": frobenius_norm(at.normed),
                "branch_norm": frobenius_norm(at.branch),
                "ffn_norm": frobenius_norm(at.ffn_branch),
                "after_attention_energy": frobenius_norm(at.after_attention).square(),
                "expected_energy": expected_pre_norm_energy(at.attention, pre, at.normed),
                **_state(pre := at.output),
            }
            if block <= config.post_norm_depth:
                post = post_norm_block(weights, post, heads=config.heads).output
                row["post_norm_similarity"] = token_similarity(post)
            frames.append(table(row, block=[block], **places))
            work()
    frame = pd.concat(frames, ignore_index=True)
    return frame.assign(predicted_similarity=frame["block"].map(dict(enumerate(predicted(frame)))))


def _state(x: Tensor) -> dict[str, Tensor]:
    return {"similarity": token_similarity(x), "odds": token_odds(x), "norm": frobenius_norm(x)}


def draw(frame: pd.DataFrame) -> Any:
    by_block = frame.groupby("block")
    mean, spread = by_block.mean(), by_block.std()
    figure, (left, right) = panels(2, width=4.6, height=3.8)
    for ax, name, colour, text in (
        (left, "post_norm_similarity", VERMILION, "post-norm, same weights"),
        (left, "similarity", BLUE, "pre-norm"),
        (right, "input_norm", BLUE, "‖X‖"),
        (right, "normed_norm", ORANGE, "‖LN(X)‖"),
        (right, "branch_norm", GREEN, "‖P LN(X) W‖"),
    ):
        line(ax, mean[name], colour, text, spread[name])
    line(left, mean["predicted_similarity"], BLACK, "pre-norm, our map", linestyle="--", linewidth=1.2)
    across = (0, mean.index[-1])
    axis(left, "Token similarity", "block", "t_sim", ylim=(0, 1.02), xlim=across)
    axis(right, "Norms in block b", "block", "Frobenius norm", ylim=(0, None), xlim=across)
    legend_below([left, right], columns=3)
    return figure


def predicted(frame: pd.DataFrame) -> list[float]:
    """t_sim by `pre_norm_odds`, from what stands at block 0 and from what the FFN adds per entry."""
    start, entries = frame[frame["block"] == 0], frame["normed_norm"].mean() ** 2  # ‖X̂‖² is the number of entries
    odds, energy = float(np.exp(np.log(start["odds"]).mean())), float((start["norm"] ** 2).mean() / entries)
    found = pre_norm_odds(odds, int(frame["block"].max()), ffn=_ffn(frame), energy=energy)
    return [similarity_of(value) for value in found]


def _ffn(frame: pd.DataFrame) -> float:
    return float((frame["ffn_norm"] ** 2).mean() / frame["normed_norm"].mean() ** 2)


def _blocks(similarity: pd.Series) -> tuple[float, float]:
    """The block that passes t_sim = 0.9, and how many more bring t_div down tenfold, to 0.99; infinite if never."""
    known = similarity.dropna()
    first, second = (known.index[known > level] for level in (ALIKE, EQUAL))
    passed = float(first[0]) if len(first) else np.inf
    return passed, float(second[0]) - passed if len(second) else np.inf


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    mean = frame.groupby("block").mean()
    similarity, norm = mean["similarity"], mean["norm"]
    step = norm.diff().dropna()
    tenths = similarity.iloc[:: max(1, len(similarity) // 10)]
    steps = frame.dropna(subset=["expected_energy"])
    share = (mean["branch_norm"] / mean["input_norm"]).dropna()
    energy = steps[["after_attention_energy", "expected_energy"]].sub(steps["input_norm"] ** 2, axis=0)
    sums = energy.groupby(steps["trial"]).sum()
    gains = sums["after_attention_energy"] / sums["expected_energy"]
    gain, error = gains.mean(), gains.std() / len(gains) ** 0.5
    (pre, pre_more), (post, post_more) = _blocks(similarity), _blocks(mean["post_norm_similarity"])
    at_least = min(pre_more, config.depth - pre)  # where the blocks end before t_div is down tenfold
    more = "" if np.isfinite(pre_more) else "more than "
    late = frame[frame["block"] >= frame["block"].max() / 2].groupby("trial")
    fitted = np.array([np.polyfit(np.log(own["block"]), np.log(own["odds"]), 1)[0] for _, own in late])
    theory = pre_norm_exponent(ffn=_ffn(frame))
    return [
        judge(
            "pre-norm similarity keeps rising with depth",
            "“in the pre-norm model token similarity still keeps increasing” (§3.1, Fig. 4 left)",
            f"{similarity.iloc[0]:.3f} → {similarity.iloc[-1]:.3f} over {config.depth} blocks",
            "the mean over trials rises over every tenth of the depth",
            tenths.is_monotonic_increasing and similarity.iloc[-1] > similarity.iloc[0],
        ),
        judge(
            "from t_sim = .9 on, similarity rises much more slowly in pre-norm than in post-norm",
            "“at a much slower escalation rate than in post-norm models” (§3.1)",
            f"from t_sim .9 to .99: {post_more:.0f} blocks (post-norm), {more}{at_least:.0f} (pre-norm)",
            "at least 3 times as many blocks for a tenfold loss of diversity; same weights",
            at_least >= 3 * post_more,
            when=np.isfinite(at_least + post_more),
        ),
        judge(
            "up to t_sim = .9, similarity rises much more slowly in pre-norm than in post-norm",
            "the same sentence, read of the way to t_sim = .9",
            f"t_sim passes .9 at block {post:.0f} (post-norm) and {pre:.0f} (pre-norm)",
            "at least 3 times as many blocks, as above",
            pre >= 3 * post if np.isfinite(pre + post) else None,
            "this was our first reading of “much slower”; the claim above was added when it failed",
        ),
        judge(
            "the trunk's norm ‖X‖ grows from block to block in pre-norm",
            "“monotonically increasing in expectation” (§3.1, Fig. 4 right)",
            f"{norm.iloc[0]:.0f} → {norm.iloc[-1]:.0f}; smallest step {step.min():+.2f}",
            "the mean over the trials rises in every block",
            (step > 0).all(),
        ),
        judge(
            "attention's share of the trunk diminishes from the first block on",
            "“the role of the self-attention mechanism is progressively diminishing” (§3.1)",
            f"‖PX̂W‖/‖X‖: {share.iloc[0]:.3f} at block 1, {share.max():.3f} at block {share.idxmax()}, "
            f"{share.iloc[-1]:.3f} at block {config.depth}",
            "the first block's share is the largest, to 5 %",
            share.iloc[0] > 0.95 * share.max(),
            "the share first rises: P averages random tokens away until they are alike",
        ),
        judge(
            "attention adds ‖P(X̂)X̂‖² to ‖X‖², in expectation",
            "eq. 20",
            f"what attention adds, over what eq. 20 says: {gain:.3f} ± {error:.3f} ({len(gains)} trials)",
            "3 standard errors, and these below 5 %",
            abs(gain - 1) < 3 * error,
            when=error < 0.05,
        ),
        judge(
            "in pre-norm the odds grow like a power of depth",
            "not in the paper; ours: attention/(attention + FFN)",
            f"exponent {fitted.mean():.2f} ± {fitted.std() / len(fitted) ** 0.5:.2f} against {theory:.2f}",
            "25 %: the fit is over the second half, not over the limit",
            abs(fitted.mean() / theory - 1) < 0.25,
            lacks="" if config.depth >= 50 else "needs at least 50 blocks",
        ),
    ]


QUICK = Config(trials=8, depth=40, post_norm_depth=20, tokens=32, width=64, heads=4)
STUDY = Study("yu2024-fig4", Config(), QUICK, compute, draw, claims)
