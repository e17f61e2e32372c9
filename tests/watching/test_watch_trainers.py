"""The callbacks inside real trainers: Hugging Face's and Lightning's."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

import depthscope
from depthscope.models import BlockConfig, Encoder
from depthscope.watching.huggingface import DepthCallback
from samples import seeded
from traces import hooks_of
from zoo import TEXT

IDS = torch.randint(5, 50, (24, 7), generator=seeded(0))
DATA = [{"input_ids": ids, "attention_mask": (torch.arange(7) < 5 + i % 3).long()} for i, ids in enumerate(IDS)]
for item in DATA:
    item["labels"] = item["input_ids"]


# --- Hugging Face ---------------------------------------------------------------------------------------


class Quiet(hf.TrainerCallback):
    """What a tracker would get."""

    def __init__(self) -> None:
        self.logs: list[tuple[int, dict[str, float]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append((state.global_step, dict(logs)))


def trainer(folder: Path, **options: Any) -> tuple[hf.Trainer, Quiet]:
    torch.manual_seed(0)
    model = hf.BertForMaskedLM(hf.BertConfig(**TEXT))
    settings = {
        "output_dir": str(folder),
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    tracker = Quiet()
    arguments = hf.TrainingArguments(**(settings | options))
    found = hf.Trainer(model=model, args=arguments, train_dataset=DATA, callbacks=[tracker])
    found.remove_callback(hf.PrinterCallback)
    return found, tracker


def losses(tracker: Quiet) -> list[float]:
    return [logs["loss"] for _, logs in tracker.logs if "loss" in logs]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_logs_the_scalars_and_trains_as_before(tmp_path: Path, accumulation: int):
    plain, plain_tracker = trainer(tmp_path, gradient_accumulation_steps=accumulation)
    plain.train()
    watched, tracker = trainer(tmp_path, gradient_accumulation_steps=accumulation)
    watched.add_callback(callback := DepthCallback(watched, every=2))
    watched.train()
    logged = [(step, logs) for step, logs in tracker.logs if "depth/t_sim_last" in logs]
    assert [step for step, _ in logged] == [0, 2, 4]
    assert callback.watch.records["step"].unique().tolist() == [0, 2, 4]
    for step, logs in logged:
        rows = callback.watch.records.query(f"measure == 'token_similarity' and block == 3 and step == {step}")
        assert logs["depth/t_sim_last"] == rows["value"].item()
    assert len({logs["depth/t_sim_last"] for _, logs in logged}) == 3  # it trains
    assert [entry["step"] for entry in watched.state.log_history if "depth/effective_depth" in entry] == [0, 2, 4]
    assert losses(tracker) == losses(plain_tracker)
    assert len(losses(tracker)) == 5
    weights = plain.model.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in watched.model.state_dict().items())
    assert not any(hooks_of(watched.model))


def test_trainer_counts_on_after_a_checkpoint(tmp_path: Path):
    first, _ = trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=3)
    first.add_callback(DepthCallback(first, every=2, path=tmp_path / "depth.jsonl"))
    first.train()
    second, _ = trainer(tmp_path, max_steps=7)
    second.add_callback(callback := DepthCallback(second, every=2, path=tmp_path / "depth.jsonl"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Trainer's own, about what a checkpoint holds
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert callback.watch.records["step"].unique().tolist() == [4, 6]
    assert depthscope.watching.load_records(tmp_path / "depth.jsonl")["step"].unique().tolist() == [0, 2, 4, 6]


def test_trainer_with_a_compiled_model(tmp_path: Path):
    compiled, tracker = trainer(tmp_path, torch_compile=True, torch_compile_backend="eager", max_steps=3)
    compiled.add_callback(callback := DepthCallback(compiled, every=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's
        compiled.train()
    assert callback.watch.records["step"].unique().tolist() == [0, 2]
    assert callback.watch.records["block"].max() == 3
    assert isinstance(compiled.model_wrapped, torch._dynamo.OptimizedModule)  # what is called between watched steps
    assert len(losses(tracker)) == 3


def test_trainer_s_callback_refuses_wrong_options_at_once(tmp_path: Path):
    plain, _ = trainer(tmp_path)
    with pytest.raises(ValueError, match="unknown measure"):
        DepthCallback(plain, measures="nothing")
    with pytest.raises(ValueError, match=r"before trainer.train\(\)"):
        _ = DepthCallback(plain).watch


# --- Lightning ------------------------------------------------------------------------------------------


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request: pytest.FixtureRequest) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of its imports
        package = pytest.importorskip(request.param)
    logging.getLogger(request.param).setLevel(logging.ERROR)
    return package


def fit(lightning: Any, folder: Path, make: Any, callbacks: list[Any], **options: Any) -> tuple[Any, Any]:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            make(self)

        def training_step(self, batch: Tensor, _index: int) -> Tensor:
            return self.run(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = lightning.Trainer(
        max_steps=5,
        accelerator="cpu",
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=lightning.loggers.CSVLogger(folder, flush_logs_every_n_steps=1),
        default_root_dir=folder,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its advice about workers
        trainer.fit(module, DataLoader(list(torch.randn(24, 7, 16, generator=seeded(1))), batch_size=2))
    return trainer, module


def in_a_child(module: Any) -> None:
    module.net = Encoder(3, BlockConfig(16, 4))
    module.run = lambda x: module.net(x)


def in_a_list_of_its_own(module: Any) -> None:
    module.layers = nn.ModuleList(Encoder(3, BlockConfig(16, 4)).blocks)
    module.run = lambda x: module(x)
    module.forward = lambda x: module.layers[2](module.layers[1](module.layers[0](x)))


@pytest.mark.parametrize("make", [in_a_child, in_a_list_of_its_own])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_lightning_logs_the_scalars(lightning: Any, tmp_path: Path, make: Any, accumulation: int):
    from depthscope.watching.lightning import DepthCallback as LightningDepth

    callback = LightningDepth(every=2)
    trainer, module = fit(lightning, tmp_path, make, [callback], accumulate_grad_batches=accumulation)
    assert callback.watch.records["step"].unique().tolist() == [0, 2, 4]
    assert callback.watch.records["block"].max() == 3
    header, *lines = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert "depth/t_sim_last" in header.split(",")
    assert [line.split(",")[header.split(",").index("step")] for line in lines] == ["0", "2", "4"]
    last = callback.watch.scalars()["depth/t_sim_last"]
    assert trainer.callback_metrics["depth/t_sim_last"].item() == pytest.approx(last, rel=1e-6)
    assert not any(hooks_of(module))


def test_lightning_after_an_exception(lightning: Any, tmp_path: Path):
    from depthscope.watching.lightning import DepthCallback as LightningDepth

    models = []

    def failing(module: Any) -> None:
        in_a_child(module)
        models.append(module)
        calls = []

        def run(x: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) > 2:
                raise RuntimeError("broken")
            return module.net(x)

        module.run = run

    with pytest.raises(RuntimeError, match="broken"):
        fit(lightning, tmp_path, failing, [LightningDepth(every=1)])
    assert not any(hooks_of(models[0]))


def test_lightning_says_which_module_it_needs(lightning: Any, tmp_path: Path):
    from depthscope.watching.lightning import DepthCallback as LightningDepth

    with pytest.raises(ValueError, match="no module 'nett' in Module; there: net"):
        fit(lightning, tmp_path, in_a_child, [LightningDepth(module="nett")])
    with pytest.raises(ValueError, match="pass its name too, module="):
        LightningDepth(blocks="blocks.*")
    callback = LightningDepth(every=2, module="net", blocks="blocks.*")
    fit(lightning, tmp_path, in_a_child, [callback])
    assert callback.watch.records["step"].unique().tolist() == [0, 2, 4]


# --- one name for both ----------------------------------------------------------------------------------


def test_one_name_gives_the_callback_of_either_trainer(tmp_path: Path):
    found, _ = trainer(tmp_path)
    assert type(depthscope.DepthCallback(found, every=2)) is DepthCallback
    assert type(depthscope.DepthCallback(every=2)).__module__ == "depthscope.watching.lightning"
    with pytest.raises(ValueError, match=r"^expected every= to be a whole number"):
        depthscope.DepthCallback(found, every=0)
    with pytest.raises(ValueError, match=r"^expected Hugging Face's Trainer .*, got int$"):
        depthscope.DepthCallback(50)


@pytest.mark.parametrize(
    ("missing", "extra", "argument"), [("lightning", "lightning", ""), ("transformers", "huggingface", "trainer")]
)
def test_the_name_is_there_without_the_trainers_and_says_what_is_missing(missing: str, extra: str, argument: str):
    code = (
        "import sys\n"
        f"for name in ('{missing}', 'pytorch_lightning'): sys.modules[name] = None\n"
        "from depthscope import DepthCallback\n"
        "assert not {'transformers', 'lightning', 'pytorch_lightning'} & {n for n, m in sys.modules.items() if m}\n"
        "from depthscope.extras import MissingExtra\n"
        "class trainer: add_callback = None\n"
        f"try: DepthCallback({argument})\n"
        f"except MissingExtra as error: assert 'depthscope[{extra}]' in str(error), error\n"
        "else: raise SystemExit('nothing was missing')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
