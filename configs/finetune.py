"""Fine-tunes any model that can be read: a Hugging Face folder, a name on its hub, or a GGUF file; on one GPU.

    surojax train --config finetune --config.model_path=MODEL --config.data=chats.jsonl

The same without `--config`, in any folder: this is the config of a command line that names only a model. Its
tokenizer and chat template are the model's own. Rows are texts, instructions or conversations; what their fields say
decides. For adapters of a frozen model add `--config.lora`, which has a learning rate of its own
(2e-4), and `--config.qlora_bnb` for a base of 4 bits. `surojax fit --config.model_path=MODEL --gpu rtx4090` finds settings that fit.
"""

from surojax.config.finetune import get_config

__all__ = ["get_config"]
