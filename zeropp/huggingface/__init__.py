"""Models of Hugging Face's ``transformers`` (5 or later) as a list of layers for ``parallelize``.

``model_layers`` reads, makes and writes them; ``cut`` finds where a model can be cut.
"""

from zeropp.huggingface.model_layers import HuggingFaceLayers, label_loss, layers, token_loss

__all__ = ["HuggingFaceLayers", "label_loss", "layers", "token_loss"]
