"""LangFlow: diffusion of normalized token embeddings with a classifier over tokens as the denoiser.

Symbols: E embeddings, gamma the logarithm of the noise-to-signal ratio, alpha^2 = sigmoid(-gamma), sigma^2 = sigmoid(gamma),
z = alpha E[x] + sigma eps, x_hat = softmax(logits) E. The network, its sampler and the form of the proposal follow the
published inference code (released); its training is known only from third parties and marked (third party).
Shapes: B batch, L tokens, H width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import LARGEST_STEPS, Config, logit_rows, opt
from jpeg_dlm.flow.guidance import keep_fixed
from jpeg_dlm.flow.likelihood import code_nats, signal_grid
from jpeg_dlm.flow.path import per_row, per_sample
from jpeg_dlm.methods.base import Batch, CheckpointSignature, Likelihood, ParameterGroup, Watch, rounded_up_share
from jpeg_dlm.methods.discrete import CE_CHUNK, DIFFUSION_TENSORS, PAPER_TOKENIZERS, DditMethod, DditSampler, with_source
from jpeg_dlm.methods.latent_likelihood import STEPS, code_noise
from jpeg_dlm.nn.ddit import DDiT, DditConfig
from jpeg_dlm.nn.layers import fp32_island
from jpeg_dlm.nn.token_loss import token_nll
from jpeg_dlm.util.rng import RowNoise, chosen_rows

GUMBEL_LOC, GUMBEL_SCALE, GUMBEL_ENTROPY = 4.723, 0.852, 7.02  # initial proposal (released)
RELEASED_WIDTH, RELEASED_VOCAB = 768, 50_257  # sizes of the model of these three values
CUTOFF = 1e-5  # probability mass that is cut off at either end of the proposal (released)
# Of small presets. At the network's rate the proposal would follow the loss only after some thousand steps: after 300 steps at
# 2e-3, the 10% of least noise still had a loss of 2 nats instead of 0.5 (measured). A small weight keeps the gradient of the
# proposal, of norm 5 to 14 at weight 1, out of the clipped norm; it does not slow AdamW.
SMALL_WEIGHT, SMALL_RATE = 1e-3, 20.0
EXACT = DditSampler()  # with the network's own distributions
MIN_SCALE = 0.05  # assumed: keeps the proposal valid if an optimizer step overshoots


@dataclass(frozen=True)
class LangFlowObjective:
    """Options of the proposal of times, self-conditioning and the skip logits."""

    gumbel_loc: float = opt(GUMBEL_LOC, "initial mode of the proposal of gamma (released); it is learned", ge=-100, le=100)
    gumbel_scale: float = opt(GUMBEL_SCALE, "initial scale of the proposal (released); it is learned", ge=MIN_SCALE, le=100)
    gumbel_entropy: float = opt(GUMBEL_ENTROPY, "initial loss of pure noise in nats (released); it is learned", gt=0, le=1e3)
    proposal_weight: float = opt(1.0, "weight of the proposal's own loss, its only gradient (third party)", gt=0, le=1e6)
    proposal_rate: float = opt(
        1.0, "learning rate of the proposal as a multiple of the network's (third party: the same)", gt=0, le=1e6
    )
    sc_prob: float = opt(0.25, "probability of self-conditioning (third party), per example (assumed)", ge=0, le=1)
    skip_ramp: int = opt(
        0,
        "steps over which the skip logits fade in; 0: half of the run, at most 5000 (third party: 5000)",
        ge=0,
        le=LARGEST_STEPS,
    )
    ce_chunk: int = opt(0, CE_CHUNK, ge=0, le=1 << 30)


# ---------------------------------------------------------------- the process


def alpha_sigma(gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of signal and noise, whose squares sum to 1."""
    return torch.sigmoid(-gamma).sqrt(), torch.sigmoid(gamma).sqrt()


def skip_scale(gamma: Tensor) -> Tensor:
    """Return alpha / sigma^2 without overflow.

    All embeddings have the same norm, so log p(z | token) = alpha / sigma^2 * z E^T up to a constant per position. Added to
    the logits, it accounts exactly for the position's own noisy embedding, so the network learns only from the context.
    """
    return ((F.softplus(-gamma) - gamma) / 2).exp()


def ddim_step(z: Tensor, x_hat: Tensor, gamma: float, next_gamma: float) -> Tensor:
    """Return alpha_s x_hat + sigma_s (z - alpha x_hat) / sigma as a mixture in float64, without cancellation (released)."""
    t, s = torch.tensor([gamma, next_gamma], dtype=torch.float64, device=z.device)
    end = torch.sigmoid(-s).sqrt() * x_hat.double()
    rescaled = z.double() * ((F.softplus(t) - F.softplus(s)) / 2).exp()
    return end.lerp(rescaled, ((s - t) / 2).exp()).to(z.dtype)


class GumbelProposal(nn.Module):
    """The distribution of gamma in training and sampling, with three parameters under their published names.

    Its CDF times `entropy` models the loss at gamma. If the model is accurate, the density of gamma is proportional to the
    slope of the loss, so each sampler step removes the same share of the uncertainty.
    """

    def __init__(self, loc: float, scale: float, entropy: float) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.tensor(loc))
        self.scale = nn.Parameter(torch.tensor(scale))
        self.entropy = nn.Parameter(torch.tensor(entropy))

    @torch.no_grad()
    def quantile(self, q: Tensor) -> Tensor:
        """Return the q-quantile of gamma (float64), with both ends cut off."""
        q = q.double().clamp(CUTOFF, math.exp(-CUTOFF))
        return self.loc.double() - self.scale.double() * (-q.log()).log()

    def predicted_loss(self, gamma: Tensor) -> Tensor:
        """Return entropy * exp(-exp(-(gamma - loc) / scale))."""
        return self.entropy * (-(-(gamma - self.loc) / self.scale).exp()).exp()


class SelfConditionedDDiT(DDiT):
    """The shared transformer on embeddings, conditioned on an earlier prediction of them."""

    def __init__(self, vocab: int, m: DditConfig) -> None:
        super().__init__(vocab, m)
        self.self_cond_proj = nn.Linear(2 * m.hidden, m.hidden, bias=False)
        nn.init.zeros_(self.self_cond_proj.weight)

    def embeddings(self) -> Tensor:
        """Return E (V, H) in fp32, with rows of norm sqrt(H)."""
        rows = self.vocab_embed.embedding.float()
        return F.normalize(rows, dim=-1) * math.sqrt(rows.shape[1])

    def conditioned(self, z_BLH: Tensor, x_BLH: Tensor) -> Tensor:
        """Return the input of the blocks: z plus a linear map of z and the earlier prediction x (zeros if there is none)."""
        with fp32_island(z_BLH):
            return z_BLH + self.self_cond_proj(torch.cat([z_BLH, x_BLH], dim=-1))


# ---------------------------------------------------------------- the method


class LangFlow(DditMethod):
    """The whole system."""

    title = "LangFlow"
    signature = CheckpointSignature(hub="langflow", tensors=(*DIFFUSION_TENSORS, "backbone.self_cond_proj.weight"))
    groups = {"model": DditConfig, "objective": LangFlowObjective, "sampler": DditSampler}
    has_phases = True  # the skip logits, which are whole in sampling

    def __init__(self, config: Config) -> None:
        super().__init__()
        o: LangFlowObjective = config.objective
        self.config = config
        self.backbone = SelfConditionedDDiT(config.data.vocab_size, config.model)
        self.proposal = GumbelProposal(o.gumbel_loc, o.gumbel_scale, o.gumbel_entropy)
        self.loss_weights = {"ce": 1.0, "proposal": o.proposal_weight}

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        config = super().adapt(base, name)
        if base.preset in PAPER_TOKENIZERS:
            return config
        vocab = math.log(base.data.vocab_size) / math.log(RELEASED_VOCAB)
        # Tokens become decodable where alpha / sigma * sqrt(H), the lead of the correct one over noise, exceeds the largest of
        # V normal numbers, about sqrt(2 log V). The loss of pure noise scales with log V. (assumed; smoke learns 3.3 from 3.2)
        loc = GUMBEL_LOC + math.log(base.model.hidden / RELEASED_WIDTH) - math.log(vocab)
        own = {"gumbel_loc": loc, "gumbel_entropy": GUMBEL_ENTROPY * vocab}
        small = {"proposal_weight": SMALL_WEIGHT, "proposal_rate": SMALL_RATE}
        return replace(config, objective=replace(config.objective, **own, **small))

    # ------------------------------------------------------------ training

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        E = self.backbone.embeddings()
        gamma_B = self.proposal.quantile(noise.stratified("time")).float()
        clean_BLH = F.embedding(batch.tokens_BL, E)
        alpha, sigma = alpha_sigma(per_row(gamma_B, clean_BLH))
        z_BLH = alpha * clean_BLH + sigma * noise.normal("state", *clean_BLH.shape[1:])
        z_BLH = with_source(z_BLH, clean_BLH[:, : batch.source_len])
        skip = self.skip_weight(noise.step)
        x_BLH = self.self_condition(z_BLH, gamma_B, E, skip, noise, batch.source_len)
        states = self.states(z_BLH, gamma_B, x_BLH, skip)
        nll_BL = token_nll(lambda s: self.logits(s, E), states, batch.tokens_BL, self.config.objective.ce_chunk)
        real_BL = batch.real_BL
        nll_B = (nll_BL.detach() * real_BL).sum(1) / real_BL.sum(1).clamp_min(1)
        error_B = nll_B - self.proposal.predicted_loss(gamma_B)  # gamma and the loss get no gradient
        return {"ce": batch.token_mean(nll_BL), "proposal": (error_B**2).mean()}

    @torch.no_grad()
    def self_condition(
        self, z_BLH: Tensor, gamma_B: Tensor, E: Tensor, skip: float, noise: RowNoise, source_len: int
    ) -> Tensor:
        """Return a first prediction for some of the rows, zeros for the others; a source is known, as in sampling."""
        x_BLH = torch.zeros_like(z_BLH)
        _, rows = chosen_rows(noise.coins("self_condition", self.config.objective.sc_prob), z_BLH.device)
        if len(rows):
            states = self.states(z_BLH[rows], gamma_B[rows], x_BLH[rows], skip)
            x_BLH[rows] = with_source(self.guess(states, E)[0], z_BLH[rows, :source_len])
        return x_BLH

    def skip_weight(self, step: int) -> float:
        """Return the weight of the skip logits: rising from 0 to 1 in training, 1 otherwise.

        While it rises the network has to decode the embeddings itself, and so learns to read its neighbors: with a ramp over
        half of a short run, it gained half as much again from context as with whole skip logits from the start (measured).
        """
        if not self.training:
            return 1.0
        ramp = self.config.objective.skip_ramp or rounded_up_share(self.config.train.steps, 0.5, most=5000)
        return min(1.0, step / ramp)

    @torch.no_grad()
    def after_step(self, step: int, total: int) -> None:
        """Clamp the proposal to a valid distribution."""
        self.proposal.scale.clamp_(min=MIN_SCALE)
        self.proposal.entropy.clamp_(min=0.0)

    def parameter_groups(self) -> list[ParameterGroup]:
        backbone, proposal = (
            {f"{part}.{name}": p for name, p in getattr(self, part).named_parameters()} for part in ("backbone", "proposal")
        )
        factor = self.config.objective.proposal_rate
        return [ParameterGroup("flow", backbone), ParameterGroup("proposal", proposal, factor)]

    # ------------------------------------------------------------ the denoiser

    def states(self, z_BLH: Tensor, gamma_B: Tensor, x_BLH: Tensor, skip: float = 1.0) -> Tensor:
        """Return (B, L, 2 H): the inputs of the head, then the scaled z that E maps to the skip logits."""
        h_BLH = self.backbone.embedded_states(self.backbone.conditioned(z_BLH, x_BLH), gamma_B)
        return torch.cat([h_BLH, skip * per_row(skip_scale(gamma_B), z_BLH) * z_BLH], dim=-1)

    def logits(self, states: Tensor, E: Tensor) -> Tensor:
        """Return logits (..., V) of states (..., 2 H)."""
        h, scaled_z = states.chunk(2, dim=-1)
        with fp32_island(states):
            skip = scaled_z @ E.T  # hundreds at low noise, where bf16 would lose whole nats
        return self.backbone.head(h).float() + skip

    def guess(self, states_BLS: Tensor, E: Tensor, sampler: DditSampler = EXACT) -> tuple[Tensor, Tensor]:
        """Return (x_hat (B, L, H), most probable tokens (B, L)), computed in chunks of positions."""
        rows = states_BLS.flatten(0, 1)
        means, tokens = [], []
        for part in rows.split(logit_rows(self.config.objective.ce_chunk, len(E))):
            logits = sampler.sharpened(self.logits(part, E))
            tokens.append(logits.argmax(-1))
            with fp32_island(logits):
                means.append(logits.softmax(-1) @ E)
        shape = states_BLS.shape[:2]
        return torch.cat(means).view(*shape, -1), torch.cat(tokens).view(shape)

    @torch.no_grad()
    def likelihood(self, batch: Batch, noise: RowNoise) -> Likelihood:
        """Estimate a bound from one noisy state of each row, by the ODE without earlier predictions (as the authors do).

        What does not count, such as a source, is known: as in sampling, the flow takes its embeddings for predictions.
        """
        E, real_BL = self.backbone.embeddings(), batch.real_BL
        clean_BLH = F.embedding(batch.tokens_BL, E)
        last, middle = (-self.proposal.quantile(torch.tensor([CUTOFF, 0.5])) / 2).exp().tolist()

        def states(y_BLH: Tensor, r: float) -> Tensor:
            gamma_B = per_sample(-2 * math.log(r), y_BLH)
            z_BLH = per_row(alpha_sigma(gamma_B)[1], y_BLH) * y_BLH
            return self.states(with_source(z_BLH, clean_BLH[:, : batch.source_len]), gamma_B, torch.zeros_like(y_BLH))

        def predict(y_BLH: Tensor, r: float) -> Tensor:
            return self.guess(states(y_BLH, r), E)[0]

        grid = signal_grid(STEPS, last, middle)
        y_BLH, nats_B = code_nats(predict, clean_BLH, *code_noise(noise, clean_BLH), grid, ~real_BL[..., None])
        nll_BL = token_nll(lambda s: self.logits(s, E), states(y_BLH, last), batch.tokens_BL, self.config.objective.ce_chunk)
        return Likelihood.over(nll_BL.double(), real_BL).plus(nats_B)

    # ------------------------------------------------------------ sampling

    @torch.no_grad()
    def sample(
        self, sampler: DditSampler, noise: RowNoise, watch: Watch | None = None, fixed_BL: Tensor | None = None
    ) -> Tensor:
        """Integrate from noise to tokens, each evaluation conditioned on the previous one; given tokens are predicted."""
        z, steps = noise.normal("sample", self.config.data.row_len, self.config.model.hidden), sampler.steps
        E = self.backbone.embeddings()
        source = z[:, :0] if fixed_BL is None else F.embedding(fixed_BL[:, : self.config.data.source_len], E)
        q = torch.linspace(1 - CUTOFF, CUTOFF, steps, dtype=torch.float64)
        gammas = self.proposal.quantile(q.to(z.device)).tolist()
        x, tokens = torch.zeros_like(z), torch.empty(0)
        for k, gamma in enumerate(gammas):
            z = with_source(z, source)
            x, tokens = self.guess(self.states(z, z.new_full((len(z),), gamma), x), E, sampler)
            if fixed_BL is not None:
                tokens = keep_fixed(tokens, fixed_BL)
                x = torch.where((fixed_BL >= 0)[..., None], F.embedding(tokens, E), x)
            if watch:
                watch(k, steps, 1 - q[k].item(), lambda tokens=tokens: tokens)
            if k + 1 < steps:
                z = ddim_step(z, x, gamma, gammas[k + 1])
        if watch:
            watch(steps, steps, 1.0, lambda: tokens)
        return tokens
