"""The data that comes with a library, augmentation image by image, the task of classifying images."""

import pytest
import torch
from torch.nn import functional as F

from depthscope.measures import token_similarity
from depthscope.models import Block
from depthscope_lab.training.data import load_digits
from depthscope_lab.training.data.augmentation import auto_augment
from depthscope_lab.training.images import ImageClassification, build_vit
from depthscope_lab.training.task import Share
from tiny_training import tiny_config, tiny_images, tiny_task

CPU = torch.device("cpu")


def test_digits_are_complete_split_and_normalised():
    data = load_digits()
    assert (len(data.train_images), len(data.test_images)) == (1437, 360)
    everything = torch.cat([data.train_images, data.test_images]).flatten(1)
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    original = torch.as_tensor(sklearn_datasets.load_digits().images).to(torch.uint8).flatten(1)
    assert sorted(map(tuple, everything.tolist())) == sorted(map(tuple, original.tolist()))
    assert data.describe() == load_digits().describe()
    assert set(data.test_labels.tolist()) == set(range(10))
    pixels = data.train_images.double() / data.white
    assert data.mean == pytest.approx((pixels.mean().item(),), abs=1e-3)  # they are given with three digits
    assert data.std == pytest.approx((pixels.std().item(),), abs=1e-3)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_augmentation_draws_a_sub_policy_for_each_image():
    policies = [lambda images, value=value: torch.full_like(images, value) for value in (0.1, 0.2, 0.3, 0.4)]
    images = torch.rand(400, 3, 4, 4, generator=generator())
    changed = auto_augment(images, generator(1), policies)
    levels, counts = changed[:, 0, 0, 0].unique(return_counts=True)
    assert levels.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert counts.min() > 60  # 100 expected, standard deviation 8.7
    assert (changed == changed[:, :1, :1, :1]).all()


def test_augmentation_is_a_function_of_the_generator_and_leaves_no_trace():
    images = torch.rand(32, 3, 32, 32, generator=generator())
    kept, state = images.clone(), torch.random.get_rng_state()
    first, again, other = (auto_augment(images, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(images, kept)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.min() >= 0
    assert first.max() <= 1
    assert first.isfinite().all()


def test_shares_of_a_batch_are_the_batch():
    task = tiny_task(tiny_config(precision="float64"))
    images, labels = task.batch(5, Share(0, 1), CPU)
    parts = [task.batch(5, Share(index, 4), CPU) for index in range(4)]
    assert torch.equal(torch.cat([part[0] for part in parts]), images)
    assert torch.equal(torch.cat([part[1] for part in parts]), labels)
    assert images.dtype == torch.float64


def test_evaluation_is_the_mean_over_all_test_images_however_shared():
    config = tiny_config(precision="float64")
    task = tiny_task(config)
    model = task.build()
    data = tiny_images()
    scores = model((data.test_images.double() / 16 - 0.5) / 0.3)
    sums = [task.evaluate(model, Share(index, 5), CPU) for index in range(5)]
    count = sum(part["count"] for part in sums)
    assert count == len(data.test_labels)
    loss = sum(part["test_loss"] for part in sums) / count
    assert loss == pytest.approx(F.cross_entropy(scores, data.test_labels).item(), rel=1e-12)
    right = sum(part["test_accuracy"] for part in sums) / count
    assert right == (scores.argmax(-1) == data.test_labels).double().mean()


def test_the_seed_alone_decides_the_weights():
    first, again, other = (build_vit(tiny_config(seed=seed), image_size=8, channels=1) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


def outputs_of_blocks(variant: str) -> list[torch.Tensor]:
    model = build_vit(tiny_config(variant=variant, depth=3), image_size=8, channels=1)
    seen: list[torch.Tensor] = []
    for block in model.modules():
        if isinstance(block, Block):
            block.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    model(torch.rand(2, 1, 8, 8, generator=generator()))
    return seen


def test_variants_are_what_they_say():
    deescalated, post, pre = (outputs_of_blocks(variant) for variant in ("deescalated", "post", "pre"))
    assert len(deescalated) == len(post) == len(pre) == 3
    assert all(token_similarity(tokens).max() < 1e-9 for tokens in deescalated)
    for tokens in post:  # the norm stands on the trunk
        torch.testing.assert_close(tokens.var(dim=-1, correction=0), torch.ones(2, 5), atol=1e-3, rtol=0)
    assert (pre[-1].var(dim=-1, correction=0) - 1).abs().max() > 0.01
    keys = [
        build_vit(tiny_config(variant=v), image_size=8, channels=1).state_dict().keys() for v in ("post", "deescalated")
    ]
    assert keys[0] == keys[1]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="batch_size of at most 36, got 37"):
        tiny_task(tiny_config(batch_size=37))
    with pytest.raises(ValueError, match="augment is for colour images"):
        ImageClassification(tiny_config(augment=True), tiny_images())
    with pytest.raises(ValueError, match="patches that divide"):
        tiny_task(tiny_config(patch_size=3)).build()
