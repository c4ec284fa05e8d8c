"""The folder of a model in the manifest."""

from rlhf_api.api_model import ApiModel, Location


class ModelSource(ApiModel):
    """A model in the Hugging Face format."""

    path: Location
    """Folder with config.json, tokenizer and safetensors, relative to the manifest, or a hub id such as owner/name."""
