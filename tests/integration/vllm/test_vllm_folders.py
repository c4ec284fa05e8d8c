"""vLLM reads the same weight files as all other readers, from every folder that passes the checks at the start."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from safetensors.torch import load_file
from tests.support.model_folders.folder_layouts import FolderLayout, layouts

from rlhf_common.model_files.model_folder_check import check_model_folder
from rlhf_common.model_files.weight_files import FolderError, read_weight_files
from rlhf_workers.generation.engine import EngineLimits
from rlhf_workers.generation.vllm_engine import environment
from rlhf_workers.generation.vllm_engine.arguments import engine_arguments

pytest.importorskip("vllm")


@settings(max_examples=80, deadline=None)
@given(layouts())
def test_vllm_reads_the_files_that_are_listed(layout: FolderLayout) -> None:
    environment.prepare(os.environ)  # before vLLM is imported
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    limits = EngineLimits(max_prompt_tokens=8, max_response_tokens=8, max_batch_size=1)
    arguments = engine_arguments({}, {}, "", "float32", limits, 1)
    with tempfile.TemporaryDirectory() as place:
        folder = layout.write(Path(place) / "model")
        try:
            check_model_folder(folder, head=True)
        except FolderError:
            assume(False)
        loader = DefaultModelLoader(LoadConfig(load_format=arguments["load_format"]))
        source = DefaultModelLoader.Source(str(folder), None, fall_back_to_pt=True)
        read = dict(loader._get_weights_iterator(source))
        listed = read_weight_files(folder)
        expected = {name: value for file in listed.files for name, value in load_file(file).items()}
        assert read.keys() == expected.keys() == listed.tensors.keys()
        assert all(read[name].equal(expected[name]) for name in read)
