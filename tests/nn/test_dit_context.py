"""The DiT with a context: which positions see it, what stands where there is none, and what does not change without it."""

import torch

from jpeg_dlm.nn.dit import Context, DiT, rope_table

N, D, C = 3, 8, 6  # two blocks of context


def dit(context_len=C, seed=0) -> DiT:
    torch.manual_seed(seed)
    network = DiT(N, D, 8, 16, 2, 2, 4.0, 8, 1, 1, 1, 0.0, context_len=context_len).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return network


def inputs(rows=4, seed=1):
    g = torch.Generator().manual_seed(seed)
    z, s = torch.randn(2, rows, N, D, generator=g)
    return z, torch.rand(rows, generator=g), s, torch.ones(rows)


def context(rows=4, seed=2):
    g = torch.Generator().manual_seed(seed)
    return Context(torch.randn(rows, C, D, generator=g), torch.ones(rows, C, dtype=torch.bool))


def test_without_context_nothing_is_added():
    """Names, shapes, the numbers drawn for weights, and rotary positions are those of a network that knows no context."""
    with_context, without = dit(), dit(0)
    added = with_context.state_dict().keys() - without.state_dict().keys()
    assert added == {"context_kind", "no_context"}
    torch.manual_seed(5)
    plain = DiT(N, D, 8, 16, 2, 2, 4.0, 8, 1, 1, 1, 0.0)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    zero = DiT(N, D, 8, 16, 2, 2, 4.0, 8, 1, 1, 1, 0.0, context_len=0)
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), zero.state_dict().values(), strict=True))
    assert without.rope_cos.shape[0] == 3 + N


def test_context_latents_have_the_positions_before_the_first():
    cos, sin = rope_table(3, N, 8, C)
    whole_cos, whole_sin = rope_table(0, N + C, 8)
    assert torch.equal(cos[:3], torch.ones(3, 8)) and cos.shape[0] == 3 + C + N
    # A turn by the distance of two positions leads from one to the other, in the context as in one long sequence.
    for table in ((cos, sin), (whole_cos, whole_sin)):
        c, s = (x[-(N + C) :] for x in table)
        step = torch.complex(c[1:, ::2], s[1:, ::2]) * torch.complex(c[:-1, ::2], s[:-1, ::2]).conj()
        torch.testing.assert_close(step, step[:1].expand_as(step))
    torch.testing.assert_close(cos[3 + C :], rope_table(0, N, 8)[0])


def test_each_latent_of_the_context_matters_and_its_place_too():
    network, given, before = dit(), inputs(), context()
    out = network(*given, context=before)
    for place in range(C):
        z = before.z_BCD.clone()
        z[:, place] += 1
        assert (network(*given, context=Context(z, before.present_BC)) - out).abs().max() > 1e-4
    swapped = Context(before.z_BCD.flip(1), before.present_BC)
    assert (network(*given, context=swapped) - out).abs().max() > 1e-4


def test_absent_latents_are_not_seen():
    network, given, before = dit(), inputs(), context()
    nothing = Context(before.z_BCD, torch.zeros_like(before.present_BC))
    torch.testing.assert_close(network(*given, context=nothing), network(*given))
    half = before.present_BC.clone()
    half[:, : C // 2] = False
    other = before.z_BCD.clone()
    other[:, : C // 2] = 100.0
    torch.testing.assert_close(
        network(*given, context=Context(other, half)), network(*given, context=Context(before.z_BCD, half))
    )


def test_a_row_sees_its_own_context_alone_and_rows_in_decode_mode_see_none():
    network, (z, t, s, w), before = dit(), inputs(), context()
    out = network(z, t, s, w, context=before)
    rows = torch.tensor([2, 0])
    torch.testing.assert_close(network(z[rows], t[rows], s[rows], w[rows], context=before.of(rows)), out[rows])
    decoded = network(z, torch.ones(4), None, w, decode_rows=4)
    both = network(
        torch.cat([z, z]), torch.cat([torch.ones(4), t]), torch.cat([torch.zeros_like(s), s]), torch.cat([w, w]), 4, before
    )
    torch.testing.assert_close(both, torch.cat([decoded, out]))


def test_no_gradient_goes_into_the_context():
    network, given, before = dit(), inputs(), context()
    z = before.z_BCD.clone().requires_grad_()
    network(*given, context=Context(z, before.present_BC)).sum().backward()
    assert z.grad is None and network.context_kind.grad is not None
