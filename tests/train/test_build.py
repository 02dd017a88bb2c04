"""Parts of a run that do not fit each other or the devices are refused; what of the meshes lies where."""

from __future__ import annotations

import dataclasses
import re
import types

import checkpoints
import jax
import numpy as np
import pytest
import tiny
from changes import changed
from letters import Letters

from agentr1_jax.errors import UserError
from agentr1_jax.policy import presets
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.config import resolve
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.tasks import make_task
from agentr1_jax.train import build
from configs import quickstart
from experiments.checks import check_placement, first_prompt
from experiments.setup import complete, make_setup, read_run, read_settings

EVERYTHING_FITS = {
    "pretrain.updates": 4,
    "pretrain.rows": 16,
    "learner.rows": 16,
    "rollout.groups": 16,
    "rollout.slots": 16,
    "rollout.swap_slots": 16,
}


def settings_with(**changes):
    return read_settings(changed(quickstart, **changes))


def make_policy(vocab_size, **changes):
    tokenizer = types.SimpleNamespace(name="some/tokenizer", vocab_size=vocab_size)
    return build.make_policy(settings_with(**changes), tokenizer)


def test_a_tokenizer_larger_than_the_embedding_is_refused(monkeypatch):
    preset = {"policy__preset": "qwen2.5-0.5b", "policy__kv_heads": None}
    assert {make_policy(n, **preset).vocab_size for n in (151_665, 151_936)} == {151_936}
    message = (
        r"tokenizer some/tokenizer has ids up to 151936, .* has 151936 rows \(qwen2\.5-0\.5b\): .*set tokenizer\.path"
    )
    with pytest.raises(UserError, match=message):
        make_policy(151_937, **preset)

    shape = DecoderConfig(vocab_size=100, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, hidden=8)
    monkeypatch.setattr(presets, "read_config", lambda path: dataclasses.replace(shape))
    weights = {"policy__preset": "", "policy__weights": "owner/name", "policy__kv_heads": None}
    assert make_policy(100, **weights).vocab_size == 100
    with pytest.raises(UserError, match=r"has ids up to 100, but the policy's embedding has 100 rows \(owner/name\)"):
        make_policy(101, **weights)


def test_a_preset_without_a_vocabulary_gets_the_tokenizers_padded():
    assert [make_policy(n).vocab_size for n in (1, 128, 129)] == [128, 128, 256]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy__preset": "qwen3"}, "unknown policy.preset 'qwen3'; choose one of tiny, qwen2.5-0.5b"),
        ({"policy__heads": 3}, r"policy: kv_heads \(4\) must divide heads \(3\)"),
        ({"mesh__tensor": 3}, r"mesh.tensor is 3, which does not divide 4 query heads; choose among \[1, 2, 4\]"),
        (
            {"policy__preset": "qwen2.5-0.5b", "budget__context_tokens": 10**5, "rollout__slot_tokens": 102400}
            | {"learner__row_tokens": 10**5, "policy__kv_heads": None},
            r"budget.context_tokens \(100000\) exceeds the 32768 positions that qwen2.5-0.5b was made for",
        ),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        make_policy(128, **changes)


def test_a_tokenizer_that_cannot_serve_an_agent_with_tools_is_refused():
    task = make_task("hopworld")
    with pytest.raises(UserError, match=r"nowhere/t\.model: no such SentencePiece model"):
        build.make_tokenizer(settings_with(tokenizer__path="nowhere/t.model"), task, resumes=False)
    with pytest.raises(UserError, match=r"tokenizer\.path: letters: its chat template writes no tool calls"):
        build.make_agent(settings_with(), task, Letters())
    many = Letters()
    many.added = {**Letters.added, "<tool_call>": 2, "</tool_call>": 3}
    assert build.make_agent(settings_with(), task, many).call_format.name == "hermes"
    many.stop_ids = (1, 2, 3, 4, 5)
    with pytest.raises(UserError, match="letters has 5 stop ids, the engine knows at most 4; shorten eos_token_id"):
        build.make_agent(settings_with(), task, many)
    agent = build.make_agent(settings_with(agent__call_format="react", tools__lenient=True), task, Letters())
    assert agent.call_format.name == "react" and agent.lenient


@pytest.fixture(scope="module")
def published_weights(tmp_path_factory):
    """A folder of weights with its tokenizer."""
    return checkpoints.write_model(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tokenizer that a run has trained."""
    settings = settings_with(run_dir=str(tmp_path_factory.mktemp("trained")), tokenizer__texts=400)
    return build.make_tokenizer(settings, make_task("hopworld", top_k=2), resumes=False)


def config_of(weights, run_dir, **changes):
    """The quickstart with published weights, for the devices of the tests."""
    fits = {"rollout__slots": 8, "learner__rows": 8, "budget__context_tokens": 1024, "warm_start__updates": 0}
    fits |= {"rollout__slot_tokens": 1024, "learner__row_tokens": 1024}
    weights = {"policy__preset": "", "policy__weights": weights, "run_dir": str(run_dir)}
    return changed(quickstart, **{**fits, **weights, **changes})


def tokenizer_of(config):
    settings = read_settings(config)
    return build.make_tokenizer(settings, make_task("hopworld"), resumes=False)


def test_published_weights_bring_their_tokenizer_and_nothing_is_trained(published_weights, tmp_path):
    config = config_of(published_weights, tmp_path / "run")
    setup, _ = make_setup(read_settings(config), resumes=False)
    assert setup.tokenizer.name == published_weights and not (tmp_path / "run").exists()
    assert complete(config).tokenizer.path == published_weights
    line = build.describe_policy(setup.settings, setup.policy, setup.agent)
    assert re.fullmatch(
        rf"policy: qwen2, [\d,]+ parameters in float32, computes in float32, from {published_weights}; "
        rf"tokenizer: {published_weights} "
        r"\(that of the weights\), 266 ids; "
        r"template: that of the tokenizer, calls as hermes, tools told by the template",
        line,
    )
    row, prompt = first_prompt(setup.settings, setup.task, setup.agent)
    shown = build.describe_prompt(row, prompt, setup.tokenizer)
    first, *text, ids = shown.split("\n")
    assert first == f"first prompt, of row hopworld/train/0, {len(prompt)} tokens:"
    assert "\n".join(text) == setup.tokenizer.decode(prompt) and '"name": "search"' in "\n".join(text)
    assert ids.split()[2:4] == [str(i) for i in prompt[:2]] and ids.split().count("...") == 1
    assert len(ids.split()) == 2 + 2 * build.SHOWN_IDS + 1


def test_a_run_says_which_tokenizer_it_trained(trained):
    settings, task = settings_with(), make_task("hopworld", top_k=2)
    agent, policy = build.make_agent(settings, task, trained), build.make_policy(settings, trained)
    line = build.describe_policy(settings, policy, agent)
    assert "from random parameters of preset tiny; tokenizer: trained on the task's texts, " in line
    line = build.describe_policy(settings_with(warm_start__init_from="some/run"), policy, agent)
    assert "from some/run; tokenizer: that of some/run, " in line


OTHER_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ({}, ""),  # A copy, perhaps with another chat template.
        ({"chat_template": checkpoints.CHATML.replace("assistant", "bot")}, ""),
        (
            {"added": OTHER_TOKENS},
            r"of the added tokens it has '<think>' \(263\), '</think>' \(264\) and lacks '<tool_call>' \(263\), .*"
            r"set tokenizer\.path='' for the tokenizer that the weights bring",
        ),
        ({"merges": (*checkpoints.MERGES[:-1], ("a", "b"))}, r"its vocabulary is another one \(261 and 261 pieces\)"),
    ],
)
def test_a_given_tokenizer_has_to_be_that_of_the_weights(published_weights, tmp_path, make, message):
    path = checkpoints.write_tokenizer(tmp_path / "other", **make)
    config = config_of(published_weights, tmp_path / "run", tokenizer__path=path)
    if not message:
        assert tokenizer_of(config).name == path and complete(config).tokenizer.path == path
        return
    with pytest.raises(
        UserError, match=rf"tokenizer\.path: {path} is not the tokenizer of policy\.weights .*: {message}"
    ):
        tokenizer_of(config)


def test_a_trained_tokenizer_is_refused_with_published_weights(published_weights, tmp_path, trained):
    with pytest.raises(UserError, match=r"tokenizer\.model is not the tokenizer of policy\.weights"):
        tokenizer_of(config_of(published_weights, tmp_path / "run", tokenizer__path=trained.name))
    # What a run of an earlier version left, whose weights had got a new tokenizer.
    values = resolve(config_of(published_weights, tmp_path / "run"))
    values["tokenizer"]["path"] = ""
    RunFolder(str(tmp_path / "run")).write_config(values)
    with pytest.raises(UserError, match="run: its policy has published weights and a tokenizer trained for the run"):
        read_run(str(tmp_path / "run"))


def test_weights_without_a_tokenizer_need_one_that_fits_their_embedding(tmp_path, trained):
    bare = checkpoints.checkpoint(tmp_path / "bare", "qwen2_tied", vocab_size=272, max_position_embeddings=4096)
    config = config_of(str(bare), tmp_path / "run")
    with pytest.raises(
        UserError, match=r"policy\.weights: .*bare has no tokenizer \(tokenizer\.json, .*or name the tok"
    ):
        tokenizer_of(config)
    path = checkpoints.write_tokenizer(tmp_path / "given")
    settings = read_settings(changed(config, tokenizer__path=path))
    tokenizer = build.make_tokenizer(settings, None, resumes=False)
    assert tokenizer.name == path and build.make_policy(settings, tokenizer).vocab_size == 272
    with pytest.raises(UserError, match=r"has ids up to \d+, but the policy's embedding has 272 rows"):
        build.make_policy(settings, trained)
    wide = checkpoints.checkpoint(tmp_path / "wide", "qwen2_tied", vocab_size=600, max_position_embeddings=4096)
    with pytest.raises(UserError, match=r"has 265 ids, and the embedding 600 rows \(.*wide\): they do not belong"):
        build.make_policy(read_settings(config_of(str(wide), tmp_path / "run", tokenizer__path=path)), tokenizer)


def test_a_base_model_without_a_chat_template_is_compared_all_the_same(tmp_path):
    weights = checkpoints.write_model(tmp_path / "base", chat_template=None)
    with pytest.raises(UserError, match=r"policy\.weights: .*base: this tokenizer lacks a chat template"):
        tokenizer_of(config_of(weights, tmp_path / "run"))
    path = checkpoints.write_tokenizer(tmp_path / "chat")
    assert tokenizer_of(config_of(weights, tmp_path / "run", tokenizer__path=path)).name == path
    other = checkpoints.write_tokenizer(tmp_path / "other", added=OTHER_TOKENS)
    with pytest.raises(UserError, match="is not the tokenizer of policy.weights"):
        tokenizer_of(config_of(weights, tmp_path / "run", tokenizer__path=other))


def test_a_template_that_leaves_out_the_tools_is_refused_before_the_start(tmp_path):
    silent = checkpoints.CHATML[checkpoints.CHATML.index("{% for m in") :]
    weights = checkpoints.write_model(tmp_path / "model", chat_template=silent)
    message = (
        r"model: its chat template does not tell the tools \(there is no 'search' in the prompt\); set agent\.call_f"
    )
    with pytest.raises(UserError, match=message):
        make_setup(read_settings(config_of(weights, tmp_path / "run")), resumes=False)
    for changes in ({"agent__call_format": "react"}, {"agent__tell_tools": False}):
        make_setup(read_settings(config_of(weights, tmp_path / "run", **changes)), resumes=False)


def test_a_length_of_observations_that_has_no_room_for_the_marker_is_refused_before_the_start(tmp_path):
    config = config_of(checkpoints.write_model(tmp_path / "model"), tmp_path / "run", budget__observation_tokens=1)
    with pytest.raises(UserError, match=r"budget\.observation_tokens: a limit of 1 tokens has no room"):
        make_setup(read_settings(config), resumes=False)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_room_for_words_is_refused_before_the_start(tmp_path):
    fits = {key.replace(".", "__"): value for key, value in EVERYTHING_FITS.items()}
    config = changed(quickstart, run_dir=str(tmp_path / "run"), tokenizer__vocab_size=300, tokenizer__texts=100, **fits)
    with pytest.raises(UserError, match="tokenizer: .*vocab_size of 300 has no room"):
        make_setup(read_settings(config), resumes=False)
    assert not (tmp_path / "run").exists()


def test_real_tokenizers_of_two_families_are_not_taken_for_one_another(data_dir, tmp_path):
    weights = checkpoints.checkpoint(tmp_path / "qwen", "qwen2_tied", vocab_size=151_936)
    for file in (data_dir / "tokenizers/qwen2.5").iterdir():
        (weights / file.name).write_bytes(file.read_bytes())
    config = config_of(str(weights), tmp_path / "run")
    assert tokenizer_of(config).vocab_size == 151_665
    same = changed(config, tokenizer__path=str(data_dir / "tokenizers/qwen2.5"))
    assert tokenizer_of(same).vocab_size == 151_665
    with pytest.raises(
        UserError, match=r"of the added tokens it has '<tool_response>' \(151665\), .* and 1 more, so that"
    ):
        tokenizer_of(changed(config, tokenizer__path=str(data_dir / "tokenizers/qwen3")))


def machines(*counts):
    """Stand-ins for the devices of processes that have so many each."""
    return [types.SimpleNamespace(process_index=i) for i, count in enumerate(counts) for _ in range(count)]


def place(*counts, **changes):
    config = changed(quickstart, **{k.replace(".", "__"): v for k, v in EVERYTHING_FITS.items()})
    check_placement(read_settings(changed(config, **changes)), machines(*counts))


def test_what_fits_is_not_refused():
    for counts in ((1,), (8,), (1, 1), (4, 4, 4, 4)):
        place(*counts)
    # Devices for rollouts alone hold no rows of a batch.
    place(8, mesh__rollout_devices=2, pretrain__updates=0, learner__rows=6, rollout__slots=2, rollout__swap_slots=0)


@pytest.mark.parametrize(
    ("counts", "changes", "message"),
    [
        ((1, 1, 1), {}, r"rollout\.groups \(16\) must be a multiple of processes x learner\.minibatches \(3 x 2\)"),
        ((1,) * 4, {"pretrain__batch": 42}, r"pretrain\.batch \(42\) must be a multiple of the 4 processes"),
        ((1,) * 4, {"warm_start__batch": 42}, r"warm_start\.batch \(42\) must be a multiple of the 4"),
        ((1, 1), {"warm_start__control_seconds": 1.0}, "clocks of several processes differ"),
        (
            (2, 2),
            {"learner__rows": 6},
            r"learner\.rows \(6\) must be a multiple of the 4 shards of a batch \(mesh\.data x mesh\.fsdp: 4 x 1\)",
        ),
        ((4, 4), {"pretrain__rows": 12}, r"pretrain\.rows \(12\) must be a multiple of the 8 shards of a batch"),
        ((4, 4), {"rollout__slots": 6}, r"rollout\.slots \(6\) must be a multiple of the 4 data shards of the rollout"),
        ((4, 4), {"rollout__swap_slots": 6}, r"rollout\.swap_slots \(6\) must be a multiple of the 4 data shards"),
        ((4,), {"rollout__tensor": 3}, r"rollout\.tensor is 3; it must divide the 4 devices of a process"),
        ((2, 2), {"mesh__fsdp": 3}, r"mesh \{'data': 1, 'fsdp': 3, 'tensor': 1\} needs 3 devices, there are 4; set"),
        ((2, 2), {"mesh__tensor": 4}, r"mesh\.tensor is 4; it must divide the 2 devices of a process"),
        ((6, 6), {"mesh__fsdp": 4}, r"mesh\.fsdp is 4; it must divide the 6 shards of a process \(6 devices, mesh\."),
        ((3, 1), {}, r"processes have \[3, 1\] devices; start each with as many as the others"),
        ((4,), {"mesh__rollout_devices": 4}, r"mesh\.rollout_devices is 4; it must leave some of the 4 devices"),
        ((8,), {"mesh__rollout_devices": 2, "pretrain__updates": 0}, r"learner\.rows \(16\) .* the 6 shards"),
    ],
)
def test_what_does_not_fit_the_devices_is_refused(counts, changes, message):
    with pytest.raises(UserError, match=message):
        place(*counts, **changes)


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (-1, 2, 2), (-1, 4, 4), (-1, 8, 1)])
def test_the_devices_of_a_process_are_a_block_of_the_mesh_in_their_own_order(sizes, monkeypatch):
    """Of devices that are named in any order; no row of a batch lies on devices of two processes."""
    monkeypatch.setattr(meshes, "Mesh", lambda devices, *_, **__: devices)
    devices = machines(4, 4, 4, 4)
    rng = np.random.default_rng(0)
    mixed = [devices[i] for i in rng.permutation(16)]
    own = {p: [d for d in mixed if d.process_index == p] for p in range(4)}
    mesh = meshes.learner_mesh(*sizes, mixed)
    for rows in mesh.reshape(-1, mesh.shape[2]):
        assert len({d.process_index for d in rows}) == 1
    for process in range(4):
        places = np.argwhere(np.vectorize(lambda d, p=process: d.process_index == p)(mesh))
        assert np.prod(places.max(0) - places.min(0) + 1) == len(places) == 4
        assert [mesh[tuple(where)] for where in places] == own[process]


@pytest.mark.parametrize(("sizes", "tensor"), [((4, 1, 2), 4), ((2, 1, 4), 2)])
def test_the_engines_heads_may_be_sharded_otherwise_than_the_learners(sizes, tensor):
    """Left to itself the compiler keeps some of these parameters whole on every device."""
    learner = meshes.learner_mesh(*sizes)
    rollout = meshes.rollout_mesh(learner, tensor)
    params = tiny.decoder_params()
    sharded = jax.device_put(params, shardings(params, learner))
    view = meshes.make_rollout_view(learner, rollout, shardings, lambda params: params)(sharded)
    for seen, original in zip(jax.tree.leaves(view), jax.tree.leaves(params), strict=True):
        assert seen.sharding.mesh == rollout
        np.testing.assert_array_equal(seen, original)
