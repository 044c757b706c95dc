"""Models of Hugging Face's ``transformers`` (5 or later) as a list of layers for ``parallelize``.

``model_layers`` reads, makes and writes them; ``cut`` finds where a model can be cut.
"""

try:
    from zeropp.huggingface.model_layers import HuggingFaceLayers, label_loss, layers, token_loss
except ModuleNotFoundError as error:
    needs = f"zeropp.huggingface needs {error.name} (pip install 'zeropp[huggingface]')"
    raise ModuleNotFoundError(needs, name=error.name) from error

__all__ = ["HuggingFaceLayers", "label_loss", "layers", "token_loss"]
