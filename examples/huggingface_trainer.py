"""Hugging Face's Trainer with a callback that logs depth through the trainer's own log. Ten seconds.

    python examples/huggingface_trainer.py

A small BERT learns to give back what it reads. The callback measures every second step as the tokens pass; no pass is
added and no bit of the training changes. It would stop the Trainer if the tokens became alike, and name the Trainer's
last good checkpoint.
"""

import tempfile

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

import depthscope


def main() -> None:
    torch.manual_seed(0)
    ids = torch.randint(5, 50, (24, 12))
    data = [{"input_ids": row, "labels": row} for row in ids]
    shape = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 64}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=5,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(BertForMaskedLM(BertConfig(vocab_size=50, **shape)), arguments, train_dataset=data)
        rule = "token_similarity>0.99 for 3"  # at three looks in a row, and the loss does not fall: it stops
        trainer.add_callback(callback := depthscope.DepthCallback(trainer, every=2, stop_if=rule))
        trainer.train()
    for entry in trainer.state.log_history:
        if "depth/t_sim_last" in entry:
            print(f"step {entry['step']}: token similarity of the last block {entry['depth/t_sim_last']:.3f}")
    watched = callback.watch.records
    print(f"stopped by the rule: {callback.watch.should_stop}")
    print(f"measured: {watched['block'].max()} blocks at steps {watched['step'].unique().tolist()}")


if __name__ == "__main__":
    main()
