"""Decoding methods that transformers moved out to hub repositories, small and by the book, for `custom_generate=`.

Each works on any causal model, through `model(...)` and the operations of its cache, or without a cache if generate()
is told `use_cache=False`: then every step reads everything again, and that is what the cached run must equal. Every
function returns the ids and, for comparison, what it decided by, one tensor a step.
"""

import torch
import torch.nn.functional as F


class Reader:
    """The model, its cache and everything read: feeds what is new, or everything where there is no cache."""

    def __init__(self, model, ids, kwargs, **outputs):
        self.model, self.ids, self.outputs = model, ids, outputs
        self.cache = kwargs.get("cache") if kwargs.get("use_cache") else None
        mask = kwargs.get("attention_mask")
        self.mask = torch.ones_like(ids) if mask is None else mask
        self.read = 0

    def __call__(self):
        """Outputs of the tokens that were not read before; without a cache, of all."""
        new = self.ids[:, self.read if self.cache is not None else 0 :]
        use = {"cache": self.cache, "use_cache": True} if self.cache is not None else {"use_cache": False}
        out = self.model(new, attention_mask=self.mask, return_dict=True, **use, **self.outputs)
        self.read = self.ids.shape[1]
        return out

    def append(self, tokens):
        """`tokens` [B, t] come after each row."""
        self.ids = torch.cat([self.ids, tokens], 1)
        self.mask = torch.cat([self.mask, torch.ones_like(tokens)], 1)

    def drop(self, count):
        """The last tokens never were."""
        self.ids, self.mask = self.ids[:, :-count], self.mask[:, :-count]
        self.read -= count
        if self.cache is not None:
            self.cache.crop(-count)

    def repeat(self, times):
        self.ids, self.mask = (x.repeat_interleave(times, 0) for x in (self.ids, self.mask))
        if self.cache is not None:
            self.cache.batch_repeat_interleave(times)

    def select(self, rows):
        self.ids, self.mask = self.ids[rows], self.mask[rows]
        if self.cache is not None:
            self.cache.batch_select_indices(rows)

    def reorder(self, rows):
        self.ids, self.mask = self.ids[rows], self.mask[rows]
        if self.cache is not None:
            self.cache.reorder_cache(rows)


def contrastive_search(model, input_ids, generation_config, alpha=0.6, candidates=4, one_by_one=False, **kwargs):
    """Of the likeliest tokens, the one whose hidden state is least like those before (arXiv 2202.06417, eq. 5).

        score(v) = (1 - alpha) p(v) - alpha max_j cos(h_v, h_j)

    All candidates are read at once in a cache repeated for them, or one by one, each undone by `crop`.
    """
    reader = Reader(model, input_ids, kwargs, output_hidden_states=True)
    batch, steps = input_ids.shape[0], []
    if one_by_one and reader.cache is not None:
        reader.cache.activate_past_recording()
    out = reader()
    context = out.hidden_states[-1]
    for _ in range(generation_config.max_length - input_ids.shape[1]):
        p, tokens = out.logits[:, -1].float().softmax(-1).topk(candidates)
        if one_by_one:
            hidden = []
            for column in tokens.unbind(1):
                reader.append(column[:, None])
                hidden.append(reader().hidden_states[-1][:, -1])
                reader.drop(1)
            hidden = torch.stack(hidden, 1)
        else:
            reader.repeat(candidates)
            reader.append(tokens.reshape(-1, 1))
            out = reader()
            hidden = out.hidden_states[-1][:, -1].unflatten(0, (batch, candidates))
        likeness = F.cosine_similarity(hidden[:, :, None], context[:, None], dim=-1)  # [B, k, T]
        likeness = likeness.masked_fill(
            reader.mask.view(batch, -1, reader.mask.shape[1])[:, :1, : context.shape[1]] == 0, -1
        )
        scores = (1 - alpha) * p - alpha * likeness.amax(-1)
        best = scores.argmax(-1)
        rows = torch.arange(batch)
        if one_by_one:
            reader.append(tokens[rows, best][:, None])
            out = reader()
        else:
            reader.select(rows * candidates + best)
            out.logits = out.logits[rows * candidates + best]
        context = torch.cat([context, hidden[rows, best][:, None]], 1)
        steps.append(scores)
    return reader.ids, steps


def dola(model, input_ids, generation_config, relative_top=0.1, **kwargs):
    """The last layer contrasted with the early layer that differs most from it (arXiv 2309.03883, eq. 2 to 5)."""
    reader, steps = Reader(model, input_ids, kwargs, output_hidden_states=True), []
    for _ in range(generation_config.max_length - input_ids.shape[1]):
        out = reader()
        mature = out.logits[:, -1].float().log_softmax(-1)
        early = [model.lm_head(hidden[:, -1]).float().log_softmax(-1) for hidden in out.hidden_states[:-1]]
        distances = []
        for each in early:
            middle = (0.5 * (mature.exp() + each.exp())).log()
            distances.append(
                sum(F.kl_div(middle, x, log_target=True, reduction="none").sum(-1) for x in (mature, each))
            )
        chosen = torch.stack(distances).argmax(0)  # [B]
        contrast = mature - torch.stack(early)[chosen, torch.arange(len(chosen))]
        unlikely = mature < mature.amax(-1, keepdim=True) + torch.tensor(relative_top).log()
        contrast = contrast.masked_fill(unlikely, float("-inf"))
        steps.append(contrast)
        reader.append(contrast.argmax(-1, keepdim=True))
    return reader.ids, steps


def group_beams(model, input_ids, generation_config, groups=2, penalty=0.7, **kwargs):
    """Diverse beam search (arXiv 1610.02424): a group is penalised for tokens that groups before it chose.

    The ids come repeated for every beam. Returns the best beam of each row.
    """
    beams = generation_config.num_beams
    size, rows = beams // groups, input_ids.shape[0] // beams
    reader, steps = Reader(model, input_ids, kwargs), []
    totals = torch.full((rows, groups, size), float("-inf"))
    totals[:, :, 0] = 0  # all beams of a group start alike
    for _ in range(generation_config.max_length - input_ids.shape[1]):
        logp = reader().logits[:, -1].float().log_softmax(-1).view(rows, groups, size, -1)
        vocab = logp.shape[-1]
        used, parents, tokens = torch.zeros(rows, vocab), [], []
        for group in range(groups):
            scores = totals[:, group, :, None] + logp[:, group] - penalty * used[:, None]
            value, index = scores.flatten(1).topk(size)  # [rows, size]
            parent, token = index // vocab, index % vocab
            totals[:, group] = value + penalty * used.gather(1, token)
            used.scatter_add_(1, token, torch.ones_like(value))
            parents.append(parent + group * size)
            tokens.append(token)
        parent = torch.cat(parents, 1) + beams * torch.arange(rows)[:, None]
        reader.reorder(parent.flatten())
        reader.append(torch.cat(tokens, 1).reshape(-1, 1))
        steps.append(totals.clone())
    best = totals.flatten(1).argmax(-1) + beams * torch.arange(rows)
    return reader.ids[best], steps


def constrained_beams(model, input_ids, generation_config, phrase=(3, 7), **kwargs):
    """Beam search in which `phrase` must appear (grid beam search, arXiv 1704.07138): beams are kept per progress.

    A beam of progress j has said the first j tokens of the phrase and is continued either by the next of them or, if
    the phrase has not begun or is complete, by any token. `num_beams` must be a multiple of len(phrase) + 1.
    """
    beams, banks = generation_config.num_beams, len(phrase) + 1
    size, rows = beams // banks, input_ids.shape[0] // beams
    reader, steps = Reader(model, input_ids, kwargs), []
    totals = torch.full((rows, banks, size), float("-inf"))
    totals[:, 0, 0] = 0
    for _ in range(generation_config.max_length - input_ids.shape[1]):
        logp = reader().logits[:, -1].float().log_softmax(-1).view(rows, banks, size, -1)
        vocab = logp.shape[-1]
        scores = totals[..., None] + logp  # [rows, banks, size, V]
        parents, tokens, values = [], [], []
        for bank in range(banks):
            pool = torch.full((rows, banks, size, vocab), float("-inf"))
            if bank in (0, banks - 1):
                pool[:, bank] = scores[:, bank]
            if bank:
                pool[:, bank - 1, :, phrase[bank - 1]] = scores[:, bank - 1, :, phrase[bank - 1]]
            value, index = pool.flatten(1).topk(size)
            parents.append(index // vocab)
            tokens.append(index % vocab)
            values.append(value)
        totals = torch.stack(values, 1)
        parent = torch.cat(parents, 1) + beams * torch.arange(rows)[:, None]
        reader.reorder(parent.flatten())
        reader.append(torch.cat(tokens, 1).reshape(-1, 1))
        steps.append(totals.clone())
    best = totals[:, -1].argmax(-1) + (banks - 1) * size + beams * torch.arange(rows)
    return reader.ids[best], steps


def greedy_loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    """The shortest decoding method of a user: the best token after the processors, until the criteria say stop."""
    reader, steps = Reader(model, input_ids, kwargs), []
    while True:
        scores = logits_processor(reader.ids, reader().logits[:, -1].float())
        steps.append(scores)
        reader.append(scores.argmax(-1, keepdim=True))
        if bool(stopping_criteria(reader.ids, scores).all()):
            return reader.ids, steps
