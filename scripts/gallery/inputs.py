"""What each trained model was trained on, in two batches of different sequences: the spread between them is shown.

Written out here or taken from what is installed (Python's manual, scikit-learn's tables), so that nothing is fetched.
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from weights import joined

Batch = dict[str, Any]

HEAVY = (  # variable domains of antibodies in use as drugs: trastuzumab, adalimumab, rituximab, and of their kin
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
    "QVQLQQPGAELVKPGASVKMSCKASGYTFTSYNMHWVKQTPGRGLEWIGAIYPGNGDTSYNQKFKGKATLTADKSSSTAYMQLSSLTSEDSAVYYCARSTYYGGDWYFNVWGAGTTVTVSA",
    "QVQLVQSGAEVKKPGASVKVSCKASGYTFTSYYMHWVRQAPGQGLEWMGIINPSGGSTSYAQKFQGRVTMTRDTSTSTVYMELSSLRSEDTAVYYCARDLGGYFDYWGQGTLVTVSS",
    "EVQLLESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAKDRGYSSGWYFDYWGQGTLVTVSS",
    "QVQLQESGPGLVKPSETLSLTCTVSGGSISSYYWSWIRQPPGKGLEWIGYIYYSGSTNYNPSLKSRVTISVDTSKNQFSLKLSSVTAADTAVYYCARGGYSYGYDYWGQGTLVTVSS",
    "QVQLVESGGGVVQPGRSLRLSCAASGFTFSSYGMHWVRQAPGKGLEWVAVISYDGSNKYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAREGDYGDYWGQGTLVTVSS",
    "EVQLVQSGAEVKKPGESLKISCKGSGYSFTSYWIGWVRQMPGKGLEWMGIIYPGDSDTRYSPSFQGQVTISADKSISTAYLQWSSLKASDTAMYYCARHRGSGSYFDYWGQGTLVTVSS",
)
LIGHT = (
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    "DIQMTQSPSSLSASVGDRVTITCRASQGIRNYLAWYQQKPGKAPKLLIYAASTLQSGVPSRFSGSGSGTDFTLTISSLQPEDVATYYCQRYNRAPYTFGQGTKVEIK",
    "QIVLSQSPAILSASPGEKVTMTCRASSSVSYIHWFQQKPGSSPKPWIYATSNLASGVPVRFSGSGSGTSYSLTISRVEAEDAATYYCQQWTSNPPTFGGGTKLEIK",
    "EIVLTQSPGTLSLSPGERATLSCRASQSVSSSYLAWYQQKPGQAPRLLIYGASSRATGIPDRFSGSGSGTDFTLTISRLEPEDFAVYYCQQYGSSPLTFGGGTKVEIK",
    "DIVMTQSPDSLAVSLGERATINCKSSQSVLYSSNNKNYLAWYQQKPGQPPKLLIYWASTRESGVPDRFSGSGSGTDFTLTISSLQAEDVAVYYCQQYYSTPWTFGQGTKVEIK",
    "EIVLTQSPATLSLSPGERATLSCRASQSVSSYLAWYQQKPGQAPRLLIYDASNRATGIPARFSGSGSGTDFTLTISSLEPEDFAVYYCQQRSNWPLTFGGGTKVEIK",
    "QSVLTQPPSVSGAPGQRVTISCTGSSSNIGAGYDVHWYQQLPGTAPKLLIYGNSNRPSGVPDRFSGSKSGTSASLAITGLQAEDEADYYCQSYDSSLSGYVFGTGTKVTVL",
    "SYELTQPPSVSVSPGQTARITCSGDALPKQYAYWYQQKPGQAPVLVIYKDSERPSGIPERFSGSSSGTTVTLTISGVQAEDEADYYCQSADSSGTYVFGTGTKVTVL",
)
# Amides and esters: acids written up to their OH, amines and alcohols from the atom that reacts.
ACIDS = (
    "CC(=O)",
    "CCC(=O)",
    "CCCC(=O)",
    "CC(C)C(=O)",
    "CC(C)(C)C(=O)",
    "FC(F)(F)C(=O)",
    "COC(=O)CC(=O)",
    "c1ccccc1C(=O)",
)
PARTNERS = ("NCc1ccccc1", "Nc1ccccc1", "NCCCC", "NC1CCCCC1", "OCC", "OCc1ccccc1", "OC(C)C", "Nc1ccc(OC)cc1")


def english(folder: Path) -> tuple[Batch, Batch]:
    """Pieces of Python's manual, 8 × 128 tokens each."""
    from transformers import AutoTokenizer

    if list(folder.rglob("*.gguf*")):
        path = joined(folder)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    else:
        tokenizer = AutoTokenizer.from_pretrained(sorted(folder.rglob("tokenizer.json"))[0].parent)
    topics = sorted(pydoc_data.topics.topics.items(), key=lambda item: len(item[1]), reverse=True)
    texts = [text for _, text in topics[:16]]
    ids = tokenizer(texts, truncation=True, max_length=128, return_tensors="pt", padding=True)["input_ids"]
    first = tokenizer.bos_token_id
    if first is not None and tokenizer.cls_token_id is None and not bool((ids[:, 0] == first).all()):
        ids = torch.cat(
            [torch.full((len(ids), 1), first), ids[:, :-1]], dim=1
        )  # trained with it: Gemma is lost without
    return tuple({"input_ids": half, "attention_mask": torch.ones_like(half)} for half in ids.split(8))  # type: ignore[return-value]


def antibodies(folder: Path) -> tuple[Batch, Batch]:
    words = _vocabulary(folder)
    return tuple(_padded([_wrapped(words, chain) for chain in chains]) for chains in _halves(HEAVY + LIGHT))  # type: ignore[return-value]


def generated_antibodies(folder: Path) -> tuple[Batch, Batch]:
    """As IgLM writes them: chain, species, residues."""
    words = _vocabulary(folder)
    lines = [["[HEAVY]", "[HUMAN]", *chain] for chain in HEAVY] + [["[LIGHT]", "[HUMAN]", *chain] for chain in LIGHT]
    return tuple(_padded([[words[w] for w in line] for line in half]) for half in _halves(lines))  # type: ignore[return-value]


def heavy_chains(folder: Path) -> tuple[Batch, Batch]:
    return _fairseq(HEAVY)


def light_chains(folder: Path) -> tuple[Batch, Batch]:
    return _fairseq(LIGHT)


def _fairseq(chains: tuple[str, ...]) -> tuple[Batch, Batch]:
    """fairseq's words: four of its own, then the residues in the order of their letters."""
    words = {letter: 4 + number for number, letter in enumerate("ACDEFGHIKLMNPQRSTVWY")}
    lines = [[0, *(words[residue] for residue in chain), 2] for chain in chains]
    return tuple(_padded(half, padding=1) for half in _halves(lines))  # type: ignore[return-value]


def reactions(folder: Path) -> tuple[Batch, Batch]:
    words = _vocabulary(folder)
    return tuple(_padded([_wrapped(words, _cut(words, line)) for line in half]) for half in _halves(_made()))  # type: ignore[return-value]


def tables(folder: Path) -> tuple[Batch, Batch]:
    """Two tables of scikit-learn: 200 rows, of which 150 have their label."""
    from sklearn import datasets

    found = []
    for load in (datasets.load_breast_cancer, datasets.load_wine):
        values, labels = load(return_X_y=True)
        table, classes = torch.tensor(values, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32)
        order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:170]
        table, classes, features = table[order], classes[order], table.shape[1]
        table = ((table - table[:120].mean(0)) / table[:120].std(0)).clamp(-10, 10) * (100 / features)
        table = torch.nn.functional.pad(table, (0, 100 - features))
        found.append({"table": table[None], "labels": classes[None, :120], "answers": classes[None, 120:]})
    return found[0], found[1]


def _made() -> list[str]:
    """Reactions, each acid with two partners."""
    pairs = [
        (acid, PARTNERS[(number + shift) % len(PARTNERS)]) for shift in (0, 3) for number, acid in enumerate(ACIDS)
    ]
    return [f"{acid}O.{partner}>>{acid}{partner}" for acid, partner in pairs]


def _vocabulary(folder: Path) -> dict[str, int]:
    lines = sorted(folder.rglob("vocab.txt"))[0].read_text(encoding="utf-8").splitlines()
    return {line: number for number, line in enumerate(lines)}


def _cut(words: dict[str, int], line: str) -> list[str]:
    """The longest words that a vocabulary has, from the left."""
    found, longest = [], max(map(len, words))
    while line:
        size = next(size for size in range(min(longest, len(line)), 0, -1) if line[:size] in words)
        found.append(line[:size])
        line = line[size:]
    return found


def _wrapped(words: dict[str, int], line: str | list[str]) -> list[int]:
    return [words["[CLS]"], *(words[word] for word in line), words["[SEP]"]]


def _halves(lines: Any) -> tuple[list[Any], list[Any]]:
    return list(lines[::2]), list(lines[1::2])


def _padded(lines: list[list[int]], padding: int = 0) -> Batch:
    most = max(map(len, lines))
    ids = torch.tensor([line + [padding] * (most - len(line)) for line in lines])
    mask: Tensor = torch.tensor([[1] * len(line) + [0] * (most - len(line)) for line in lines])
    return {"input_ids": ids, "attention_mask": mask}
