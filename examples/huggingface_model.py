"""A model of Hugging Face, measured block by block: a deep BERT with random weights. Five seconds.

    python examples/huggingface_model.py [FOLDER]

With a folder (or a name in your local cache), your saved model is measured instead, on the texts below. The verdict
says whether its tokens become equal, and at which block.
"""

import sys

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import depthscope

TEXTS = [
    "The lighthouse keeper counted the ships of that night twice, and wrote both numbers down.",
    "Fold the egg whites into the batter slowly; if you stir, the air is lost.",
    "A matrix whose rows sum to one keeps the vector of ones, whatever else it does.",
    "Snow was forecast for the pass, so the last bus left two hours early.",
]


def deep_bert(depth: int = 48) -> tuple[BertModel, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
    config = BertConfig(vocab_size=500, num_hidden_layers=depth, initializer_range=0.07, **shape)
    return BertModel(config), {"input_ids": torch.randint(5, 500, (4, 64))}


def main() -> None:
    if len(sys.argv) > 1:
        model, tokenizer = AutoModel.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
        profile = depthscope.probe(model, TEXTS, tokenizer=tokenizer)
    else:
        model, batch = deep_bert()
        profile = depthscope.probe(model, batch)
    print(depthscope.diagnose(profile))


if __name__ == "__main__":
    main()
