"""The table of architectures is well formed, and transformers builds models of the published size from it."""

import copy
import os
from pathlib import Path

import pytest
import yaml
from matrix import is_installed, of_today

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PATH = Path(__file__).parents[2] / "fsdp_advisor" / "model" / "architectures.yaml"
ROWS = yaml.load(PATH.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)

AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "image-text-to-text": "AutoModelForImageTextToText",
}


def mtp(hidden, intermediate, heads, kv_heads):
    """Parameters of the layer of multi-token prediction in Qwen3.5's checkpoints, which transformers does not build.

    A gated attention with heads of 256, an MLP, the product that joins embedding and hidden state, and their norms.
    """
    attention = hidden * heads * 512 + 2 * hidden * kv_heads * 256 + heads * 256 * hidden + 2 * 256
    return attention + 3 * hidden * intermediate + 2 * hidden * hidden + 5 * hidden


# Parameter counts from sources independent of the table.
HUB = "safetensors.total in the hub's model API"
NO_MTP = f"{HUB}, less the layer of multi-token prediction"
PUBLISHED = [
    ("meta-llama/Llama-2-7b-hf", 6_738_415_616, HUB),
    ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248, HUB),
    ("meta-llama/Llama-3.1-405B-Instruct", 405_853_388_800, HUB),
    ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, HUB),
    ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496, HUB),
    ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008, HUB),
    ("mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552, HUB),
    ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46_702_792_704, HUB),
    ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768, HUB),
    ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512, HUB),
    ("Qwen/Qwen3-0.6B", 751_632_384 - 151_936 * 1024, f"{HUB}, less the stored copy of the tied head"),
    ("Qwen/Qwen3-1.7B", 2_031_739_904 - 151_936 * 2048, f"{HUB}, less the stored copy of the tied head"),
    ("Qwen/Qwen3-32B", 32_762_123_264, HUB),
    ("google/gemma-2-2b-it", 2_614_341_888, HUB),
    ("google/gemma-3-1b-it", 999_885_952, HUB),
    ("google/gemma-3-4b-it", 4_300_079_472 - 416_866_032 - 1152 * 2561, f"{HUB}, less vision tower and projector"),
    ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552, HUB),
    ("microsoft/phi-4", 14_659_507_200, HUB),
    ("meta-models/Muse-Glimmer-30B", 29_776_626_688, HUB),
    ("meta-llama/Llama-3.2-11B-Vision-Instruct", 10_670_220_835, HUB),
    ("upstage/SOLAR-10.7B-Instruct-v1.0", 10_731_524_096, HUB),
    ("Qwen/Qwen2-57B-A14B", 57_408_658_944, HUB),
    ("ibm-granite/granite-4.0-350m", 352_379_904, HUB),
    ("ibm-granite/granite-4.0-1b", 1_631_750_144, HUB),
    ("gpt2", 137_022_720 - 12 * 1024 * 1024, f"{HUB}, less the causal masks stored with the weights"),
    ("EleutherAI/pythia-70m", 70_426_624, "model card, table of sizes"),
    ("EleutherAI/pythia-1.4b-deduped", 1_414_647_808, "model card, table of sizes"),
    ("EleutherAI/pythia-12b", 11_846_072_320, "model card, table of sizes"),
    ("EleutherAI/gpt-neox-20b", 20_554_567_680, "model card"),
    ("bigscience/bloom", 176_247_271_424, "model card"),
    ("tiiuae/falcon-7b-instruct", 7_217_189_760 - 65_024 * 4544, f"{HUB}, less the stored copy of the tied head"),
    (
        "deepseek-ai/DeepSeek-V3",
        671_026_419_200 - 58 * 256,
        "checkpoint without its multi-token-prediction layer, less the routers' correction biases",
    ),
    ("openai/gpt-oss-20b", 20_914_757_184, f"{HUB}; arXiv:2508.10925 table 1: 20.91B"),
    ("openai/gpt-oss-120b", 116_829_156_672, f"{HUB}; arXiv:2508.10925 table 1: 116.83B"),
    ("allenai/OLMo-2-1124-7B-Instruct", 7_298_617_344, HUB),
    ("ibm-granite/granite-3.3-2b-instruct", 2_533_539_840, HUB),
    ("ibm-granite/granite-3.3-8b-instruct", 8_170_864_640, HUB),
    ("FacebookAI/roberta-base", 124_697_433, HUB),
    ("google/vit-base-patch16-224", 86_567_656, HUB),
    ("openai/whisper-large-v3", 1_543_490_560, HUB),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct", 480_154_875_392, HUB),
    ("Qwen/Qwen3-Coder-Next", 79_674_391_296, HUB),
    ("Qwen/Qwen3-VL-8B-Instruct", 8_767_123_696, HUB),
    ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656, HUB),
    ("Qwen/Qwen3.5-4B", 4_659_865_088 - mtp(2560, 9216, 16, 4), NO_MTP),
    ("Qwen/Qwen3.5-9B", 9_653_104_368 - mtp(4096, 12288, 16, 4), NO_MTP),
    ("Qwen/Qwen3.5-27B", 27_781_427_952 - mtp(5120, 17408, 24, 4), NO_MTP),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 108_641_793_536, HUB),
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 401_583_781_376, HUB),
    ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", 24_011_361_280, HUB),
    ("google/gemma-3-270m", 268_098_176, HUB),
    ("google/gemma-4-26B-A4B-it", 25_805_933_872, HUB),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31_577_937_344, HUB),
    ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8_888_227_328, HUB),
    ("MiniMaxAI/MiniMax-M2", 228_689_764_864 - 62 * 256, f"{HUB}, less the routers' correction biases"),
    ("moonshotai/Kimi-K2-Base", 1_026_408_232_448 - 60 * 384, "checkpoint, less the routers' correction biases"),
    ("ibm-granite/granite-4.0-h-small", 32_207_337_984, HUB),
    ("HuggingFaceTB/SmolLM3-3B", 3_075_098_624, HUB),
    ("ByteDance-Seed/Seed-OSS-36B-Instruct", 36_151_104_512, HUB),
    ("swiss-ai/Apertus-8B-2509", 8_053_338_176, HUB),
    ("allenai/Olmo-3-1025-7B", 7_298_011_136, HUB),
    ("LiquidAI/LFM2-1.2B", 1_170_340_608, HUB),
    ("baidu/ERNIE-4.5-21B-A3B-PT", 21_825_437_888, HUB),
    ("openai/whisper-large-v3-turbo", 808_878_080, HUB),
]


def row_id(row):
    return row.get("id", "?") if isinstance(row, dict) else "?"


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_row_is_well_formed(row):
    assert set(row) - {"aliases", "tapes"} == {"id", "task", "parameters", "source", "config"}
    assert isinstance(row["id"], str) and row["id"].count("/") == 1
    assert row["task"] in AUTO_CLASSES
    assert row.get("tapes", "usual") in ("none", "usual")
    assert type(row["parameters"]) is int and row["parameters"] > 0
    assert isinstance(row["source"], str) and row["source"].strip()
    aliases = row.get("aliases", [])
    assert isinstance(aliases, list) and all(isinstance(alias, str) and alias.strip() for alias in aliases)
    config = row["config"]
    assert isinstance(config, dict) and all(isinstance(key, str) for key in config)
    assert isinstance(config["model_type"], str)
    for key, value in config.items():  # YAML reads 1e-5, without a dot, as a string
        assert not (isinstance(value, str) and value[:1].isdigit()), f"{key}: {value!r} should be a number"


def test_names_are_unique_ignoring_case():
    names = [name.lower() for row in ROWS for name in (row["id"], *row.get("aliases", []))]
    assert sorted(names) == sorted(set(names))


def test_every_task_has_models():
    assert len(ROWS) >= 260
    assert {row["task"] for row in ROWS} == set(AUTO_CLASSES)


def build(row):
    """The model of a row on the meta device."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**copy.deepcopy(row["config"]))
    with torch.device("meta"):
        model = getattr(transformers, AUTO_CLASSES[row["task"]]).from_config(config)
    if row["config"].get("tie_word_embeddings") is False:  # transformers 5 ties T5's head even if the config does not
        head = model.get_output_embeddings()
        if head.weight is model.get_input_embeddings().weight:
            head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    return model


@pytest.mark.parametrize(
    "row", of_today([row for row in ROWS if is_installed(row["config"]["model_type"])], 8), ids=row_id
)
def test_transformers_builds_the_stated_number_of_parameters(row):
    assert sum(parameter.numel() for parameter in build(row).parameters()) == row["parameters"]


@pytest.mark.parametrize(("name", "total", "source"), PUBLISHED, ids=[name for name, *_ in PUBLISHED])
def test_total_equals_the_published_total(name, total, source):
    (row,) = (row for row in ROWS if name in (row["id"], *row.get("aliases", [])))
    assert row["parameters"] == total, source
