"""Every mistake in a configuration gives one message with file, key, value and what is allowed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.experiments.config.loading import load_experiment, shipped_configs
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.experiments.run.experiment import deploy_all
from sarathi_sim.profiler.bundle.schema import bundle_path
from sarathi_sim.profiler.facts.hf_config import model_fields
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.strict import SpecError, UserError
from tests.experiments.small_config import SMALL, Write, deployed, message
from tests.sampled import profile_folder

IN_FILE = [
    ("seed: 7", "sede: 7", "small.yaml: sede: unknown key (did you mean seed?)"),
    ("seed: 7", "seed: -1", "small.yaml: seed: value -1: must be at least 0"),
    ("pd_ratio: 5", "pd_ratio: .nan", "workload.pd_ratio: value nan: must be a finite number"),
    ("  pd_ratio: 5\n", "", "workload.pd_ratio: this key is missing"),
    ("min: 200", "mni: 200", "workload.lengths.mni: unknown key (did you mean min?)"),
    ("kind: uniform", "kind: zipff", "workload.lengths.kind: value 'zipff': one of zipf, "),
    ("max: 600", "max: 100", "workload.lengths.max: value 100: must be at least min"),
    ("max: 600", "max: 2000", "cluster.max_length: value 1024: request"),
    ("max_batch: 4", "max_batch: 500", "batching.max_batch: value 500: does not fit: must be"),
    ("case: best", "case: bset", "policy.case: value 'bset': one of best, worst, uncon"),
    ("case: best", "case: bset", "(did you mean best?)"),
    ("  orca: {}", "  orca: 3", "scenarios.orca: value 3: expected keys and values"),
    ("  orca: {}", "  ../orca: {}", "scenarios: value '../orca': a name is 1 to 64 letters"),
    ("  orca: {}", "  figures: {}", "scenarios: value 'figures': this name is taken"),
    # YAML 1.1 merged what was below ``<<``; here it is a key like any other, hence unknown.
    ("orca: {}", "orca: {<<: [1]}", "scenarios.orca.<<: unknown key"),
    ("name: small", "name: a/b", "small.yaml: name: value 'a/b': must be 1 to 64 letters"),
    ("[orca, sarathi]", "[orca, sarathu]", "compare.speedup.over: value 'sarathu': one of"),
    ("pp: 8", "pp: 97", "cluster.pp: value 97: must be at most 96, the layers of gpt3-175b"),
    ("tp: 8, pp: 8", "tp: 1, pp: 1", "cluster: gpt3-175b does not fit: stage 0 of 1 holds"),
    ("gpt3-175b", "gpt3-175", "small.yaml: model: unknown model 'gpt3-175' (did you mean"),
    ("a100-80g-sxm", "h100-80g-sxm", "h100-80g-sxm has no op times without a stack: name one"),
    ("gpt3-175b", "qwen-72b\nprofiles: mine", "without profiles the calibrated model of a100-80"),
    ("pp: 8,", "pp: 8, layers_per_stage: [96],", "layers_per_stage: value [96]: must be 8 num"),
    ("seed: 7", "seed: 7\nseed: 8", "small.yaml: line 4: key 'seed' is given twice"),
    ("seed: 7", "seed: &a 7\nprofiles: *a", "line 4: aliases (*name) are not allowed"),
    ("seed: 7", "seed: !!python/name:os.system", "not valid YAML: the tag !!python/name:os.sy"),
    (SMALL, "- a\n- b\n", "small.yaml: expected keys and values"),
    (SMALL, "[" * 5000, "small.yaml: line 1: not valid YAML: nested too deep"),
]
SET = [
    ("seed", "--set seed: expected KEY.PATH=VALUE"),
    ("seed\n3", "--set seed 3: expected KEY.PATH=VALUE"),
    ("cluster.pp=[", "--set cluster.pp=[: "),
    ("scenarios.sarathi.policy.chunk_size=0", "--set scenarios.sarathi.policy.chunk_size: value 0"),
    ("scenarios.sarathy.seed=0", "no scenario is called sarathy (did you mean sarathi?); there"),
    ("scenarios={}", "--set scenarios: value {}: expected scenario names, each with its keys"),
    ("scenarios.ORCA={}", "value 'ORCA': another name differs in upper and lower case only"),
    ("workload={requests: 3}", "--set workload.lengths: this key is missing"),
    ("cluster={tp: 8, gpus_per_node: 3}", "value 8: must be at most 3, the GPUs of a node, or a"),
    ("batching.kv_reservation=declared", "kv_reservation: value 'declared': has no effect: "),
    ("compare.speedup.metric=mpsan", "--set compare.speedup.metric: value 'mpsan': mpsan is"),
    ("engine.op_scale.attention=2", "engine.op_scale"),
    ("workload.system_prompts.a={share: 0.5, token: 9}", "token: unknown key (did you mean tok"),
    ("workload.system_prompts.a b={share: 0.5, tokens: 9}", "value 'a b': must be 1 to 64 lett"),
    ("workload.arrivals={kind: poisson, rate: 1e-5}", "arrivals.rate: value 1e-05: the last"),
    ("workload.arrivals={kind: gamma, rate: 1e-320, cv: 10}", "must be less than 2097152 s"),
]


@pytest.mark.parametrize(("old", "new", "expected"), IN_FILE)
def test_one_message(write_config: Write, old: str, new: str, expected: str) -> None:
    assert old in SMALL
    text = message(write_config(SMALL.replace(old, new)))
    assert expected in text
    assert "Traceback" not in text


@pytest.mark.parametrize(("assignment", "expected"), SET)
def test_set_errors(assignment: str, expected: str) -> None:
    assert expected in message(SMALL, assignment)


def test_messages_tell_an_override_from_what_is_set_above_it(write_config: Write) -> None:
    found = message(write_config(SMALL.replace("orca: {}", "orca: {seed: x}")), "seed=3")
    assert "small.yaml: scenarios.orca.seed: value 'x'" in found
    text = SMALL.replace("  orca: {}", "  orca: {seed: 1}")
    found = message(text.replace("  sarathi: {", "  sarathi: {seed: 2, "), "seed=3")
    assert "--set seed: has no effect" in found
    assert "--set scenarios.orca.seed=..." in found


def test_set_changes_values_in_order() -> None:
    changes = ["seed=1", "seed=2", "engine.turnaround_s=5e-3", "scenarios.orca.cluster.pp=4"]
    experiment = load_experiment(yaml.safe_load(SMALL), [*changes, "compare={}"])
    orca, sarathi = experiment.scenarios["orca"], experiment.scenarios["sarathi"]
    assert (orca.seed, sarathi.seed) == (2, 2)
    assert orca.engine.turnaround_s == 0.005
    assert (orca.cluster.pp, sarathi.cluster.pp) == (4, 8)
    assert orca.cluster.tp == 8, "the rest of the mapping stays"
    assert experiment.compare == {}, "the ratios are taken away"


def test_all_mistakes_are_said_at_once_and_one_at_the_top_only_once() -> None:
    wrong = SMALL.replace("pp: 8", "pp: 0")
    (line,) = message(wrong).splitlines()
    assert line.count("cluster.pp") == 1
    assert len(message(wrong.replace("seed: 7", "seed: x")).splitlines()) == 2


def test_what_is_filled_in_and_told() -> None:
    """The default batch shares memory among micro-batches in flight (the demo has the paper's); a
    file without scenarios is one; contexts beyond the model are noted."""
    found = deployed(SMALL.replace("{max_batch: 4}", "{max_in_flight: 4}"))["orca"]
    assert found.scenario.batching.max_batch == found.kv_capacity // 1024 // 4
    demo = deployed("gpt3_pp", "workload.requests=10")
    sizes = {name: one.scenario.batching.max_batch for name, one in demo.items()}
    assert sizes == {"orca_pp": 27, "sarathi_pp": 27, "orca_tp": 11}
    assert list(deployed(SMALL[: SMALL.index("scenarios:")])) == ["small"]
    notes = deployed(SMALL, "cluster.max_length=16384")["orca"].notes
    assert "max_length 16384 is more than 2048, the context of gpt3-175b" in notes[0]
    assert "the longest measured context of" in notes[1]


def test_a_cache_too_small_for_a_sequence_says_how_many_tokens_it_holds() -> None:
    """The KV tokens of the same server whose sequences are short enough; vLLM says them, too."""
    config = (
        "{model: llama-3.1-8b, device: rtx-4090, stack: vllm, workload: {requests: 10, lengths: "
        "{kind: fixed, prompt: 1024, decode: 256}}, policy: {name: vllm}, "
        "kv_cache: {gpu_memory_utilization: 0.95}, cluster: {max_length: %s}}"
    )
    (short,) = deployed(config % 4096).values()
    assert short.kv_capacity == 54_528
    text = message(config % 131072)
    assert "holds 54528 tokens, too few for a sequence of 131072: lower max_length to at m" in text
    assert "a larger tp where its all-reduces were measured" in text


def test_every_key_has_a_bound_or_a_choice() -> None:
    """A number without bounds would let a typo ask for a simulation that never ends."""

    def walk(node: dict[str, object], path: str) -> None:
        options = node.get("anyOf", [node])
        assert isinstance(options, list)
        for option in options:
            if option.get("type") in ("integer", "number"):
                keys = option.keys()
                assert keys & {"minimum", "exclusiveMinimum"}, path
                assert keys & {"maximum", "exclusiveMaximum"}, path

    schema = Scenario.model_json_schema()
    for name, definition in {**schema["$defs"], "Scenario": schema}.items():
        for key, node in definition["properties"].items():
            walk(node, f"{name}.{key}")


def test_no_file_and_not_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file, nor a shipped configuration \(.*gpt3_pp"):
        load_experiment(tmp_path / "absent.yaml")
    path = tmp_path / "small.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8 text" in message(path)


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_are_good(name: str) -> None:
    if name in ("pd_sweep", "mtp_qwen3_5"):
        return  # tests/experiments/test_sweep_plan.py
    experiment = load_experiment(name)
    if name == "azure_trace":
        with pytest.raises(UserError, match=r"AzureLLMInferenceTrace_conv\.csv: No such file"):
            deploy_all(experiment)
    else:
        deploy_all(experiment)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)


trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)


KEYS = [*Scenario.model_fields, "name", "scenarios", "compare", "description"]


@given(st.sampled_from(KEYS), trees)
def test_no_value_breaks_the_checks(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    content = {**yaml.safe_load(SMALL), key: value}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    try:
        deploy_all(load_experiment(path))
    except UserError as error:
        assert str(path) in str(error)


def test_a_model_that_shares_its_name_with_a_profiled_one(write_config: Write) -> None:
    """A file of one's own for gpt3-175b, but half as deep."""
    shipped = yaml.safe_load((data_dir() / "models" / "gpt3-175b.yaml").read_text())
    path = write_config(SMALL)
    half = path.parent / "half.yaml"
    half.write_text(yaml.safe_dump(shipped | {"num_layers": 48}))
    profiles = profile_folder("a100-80g-sxm", "gpt3-175b", 8).parents[2]
    text = message(path, f"model={half}", f"profiles={profiles}")
    assert "was made for another model of that name, with num_layers 96, not 48" in text


def test_a_bundle_in_the_place_of_another(tmp_path: Path, write_config: Write) -> None:
    """Copied by hand to another degree's folder: its times are those of other shards."""
    shipped = profile_folder("a100-80g-sxm", "gpt3-175b", 8)
    place = bundle_path(tmp_path / "profiles", "a100-80g-sxm", "gpt3-175b", 4)
    shutil.copytree(shipped, place)
    text = message(write_config(SMALL), f"profiles={tmp_path / 'profiles'}", "cluster.tp=4")
    assert "holds the bundle of a100-80g-sxm tp 8, not a100-80g-sxm tp 4" in text


def test_a_trace_that_is_shorter_or_longer_than_a_run_may_be(tmp_path: Path) -> None:
    (path := tmp_path / "trace.csv").write_text("arrival,prompt,decode\n0,5,5\n3e6,5,5\n")
    trace = ("workload.pd_ratio=null", f"workload.lengths={{kind: trace, path: {path}}}")
    for more, has in {
        (): "2 requests: must be at most 2,",
        ("workload.every=2",): "2 requests, of which one in 2 is kept: must be at most 1,",
        ("workload.lengths.sample=1e-9",): "1 request in a sample of 1e-09: must be at most 1,",
    }.items():
        text = message(SMALL, *trace, *more)
        assert f"workload.requests: value 60: {path} has {has} or left out for all" in text
        assert "set workload.lengths.resample=100" in text and "\n" not in text.strip()
    late = ("workload.requests=2", "workload.arrivals={kind: trace}")
    assert "the last request arrives after 3e+06" in (found := message(SMALL, *trace, *late))
    assert "lengths.path: " in found
    # Requests that are left out do not count: two are left, and the second comes too late.
    path.write_text("arrival,prompt,decode\n0,0,5\n0,5,5\n3e6,5,5\n")
    skip = "workload.lengths.skip_empty=true"
    assert "arrives after 3e+06" in message(SMALL, *trace, *late, skip)


@pytest.mark.parametrize("kind", [["llama"], {}, None, 3])
def test_a_model_type_that_is_no_text(kind: object) -> None:
    with pytest.raises(SpecError, match=r"config\.json: model_type .* is not supported; allowed: "):
        model_fields({"model_type": kind}, "config.json")
