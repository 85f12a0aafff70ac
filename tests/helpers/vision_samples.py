"""Five samples, with two images, one, or none: as one packed row, and each alone."""

import torch
import transformers

from openrlhf.utils.images import ImageProcessor, read_picture
from openrlhf.utils.packing import PackedBatch
from tests.helpers import tiny_vision

SIZES = [[(56, 56), (112, 84)], [], [(168, 56)], [], [(56, 56)]]
TEXTS = ["two", "no image at all", "one", "b", "last"]
BAN = [8, 9]  # <|image_pad|> and <|video_pad|>


class Samples:
    """Five samples: with two pictures, one, or none."""

    def __init__(self, folder: str) -> None:
        self.processor = ImageProcessor.load(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.pictures = [
            [read_picture(tiny_vision.noise(*size, seed=i)) for size in sizes]
            for i, sizes in enumerate(SIZES)
        ]
        self.ids = []
        for text, pictures in zip(TEXTS, self.pictures, strict=True):
            content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": text}]
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]
            ids = tokenizer.apply_chat_template(turns, return_dict=False)
            self.ids.append(torch.tensor(self.processor.expand(ids, pictures)))

    def batch(self, indices=range(5)) -> PackedBatch:
        """A row with all samples, or these; every token but placeholders is a target."""
        ids = [self.ids[i] for i in indices]
        masks = [(torch.arange(len(x)) > 0) & ~torch.isin(x, torch.tensor(BAN)) for x in ids]
        packed = PackedBatch.from_sequences(ids, masks)
        return packed.with_pictures([self.pictures[i] for i in indices], self.processor)

    def alone(self, model, i) -> torch.Tensor:
        """Log-probs of a sample's targets by the model's own forward pass."""
        inputs = {"input_ids": self.ids[i][None], "attention_mask": torch.ones(1, len(self.ids[i]))}
        if self.pictures[i]:
            images = self.processor.pixels(self.pictures[i])
            inputs |= {"pixel_values": images.pixels, "image_grid_thw": images.grid}
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == 8).int()
        model.model.rope_deltas = None
        logits = (
            model(**inputs)
            .logits[0, :-1]
            .index_add(-1, torch.tensor(BAN), torch.full((len(self.ids[i]) - 1, 2), -100.0))
        )
        logprobs = logits.log_softmax(-1).gather(-1, self.ids[i][1:, None])[:, 0]
        return logprobs[~torch.isin(self.ids[i][1:], torch.tensor(BAN))]
