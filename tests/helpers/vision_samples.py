"""Five samples, with two images, one, or none: as one packed row, and each alone."""

import torch
import transformers

from openrlhf.models.vision import family_of
from openrlhf.utils.images import ImageProcessor, read_picture
from openrlhf.utils.packing import PackedBatch
from tests.helpers import tiny_vision

SIZES = [[(56, 56), (112, 84)], [], [(168, 56)], [], [(56, 56)]]
TEXTS = ["two", "no image at all", "one", "b", "last"]


def processor_of_family(folder: str, image_processor: object) -> transformers.ProcessorMixin:
    """The family's own processor of texts and images, on the same image processor."""
    kind = transformers.AutoConfig.from_pretrained(folder).model_type
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if kind in ("idefics3", "smolvlm"):  # SmolVLM's own writes the same, and needs num2words
        return transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=4)
    video = transformers.AutoVideoProcessor.from_pretrained(folder)
    if kind == "internvl":
        return transformers.InternVLProcessor(image_processor, tokenizer, video, image_seq_length=4)
    names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    return getattr(transformers, f"{names[kind]}Processor")(image_processor, tokenizer, video)


class Samples:
    """Five samples: with two pictures, one, or none."""

    def __init__(self, folder: str) -> None:
        self.processor = ImageProcessor.load(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.of_family = processor_of_family(folder, image_processor)
        self.banned = torch.tensor(self.processor.banned_token_ids)
        self.pictures = [
            [read_picture(tiny_vision.noise(*size, seed=i)) for size in sizes]
            for i, sizes in enumerate(SIZES)
        ]
        self.ids = []
        for text, pictures in zip(self.texts, self.pictures, strict=True):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            self.ids.append(torch.tensor(self.processor.expand(ids, pictures)))

    @property
    def texts(self) -> list[str]:
        """The samples as their chat template writes them."""
        texts = []
        for text, pictures in zip(TEXTS, self.pictures, strict=True):
            content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": text}]
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]
            texts.append(self.tokenizer.apply_chat_template(turns, tokenize=False))
        return texts

    def batch(self, indices=range(5)) -> PackedBatch:
        """A row with all samples, or these; every token but placeholders is a target."""
        ids = [self.ids[i] for i in indices]
        masks = [(torch.arange(len(x)) > 0) & ~torch.isin(x, self.banned) for x in ids]
        packed = PackedBatch.from_sequences(ids, masks)
        return packed.with_pictures([self.pictures[i] for i in indices], self.processor)

    def inputs(self, i) -> dict[str, torch.Tensor]:
        """The ids and pixels of a sample as the family's own processor makes them."""
        images = [picture.open() for picture in self.pictures[i]]
        images = {"images": [images]} if images else {}
        found = self.of_family(text=[self.texts[i]], return_tensors="pt", **images)
        if family_of(self.processor.family.config).has_grid_positions:
            found["mm_token_type_ids"] = (found["input_ids"] == 8).int()
        return {**found}

    def alone(self, model, i) -> torch.Tensor:
        """Log-probs of a sample's targets by the model's own forward pass."""
        model.model.rope_deltas = None
        inputs = self.inputs(i)
        logits, ids = model(**inputs).logits[0, :-1], inputs["input_ids"][0]
        logits = logits.index_add(
            -1, self.banned, torch.full((len(logits), len(self.banned)), -100.0)
        )
        logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return logprobs[~torch.isin(ids[1:], self.banned)]
