"""Optimizers against plain definitions."""

import torch

from tools.mini.optim import Adam, Muon, orthogonalised


def test_orthogonalised_pushes_singular_values_towards_one_and_keeps_directions():
    torch.manual_seed(0)
    for shape in ((3, 48, 48), (2, 32, 64), (2, 64, 32)):
        matrices = torch.randn(shape)
        result = orthogonalised(matrices)
        values = torch.linalg.svdvals(result)
        assert 0.5 < values.median() < 1.3
        assert values.max() < 1.4
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        torch.testing.assert_close((result * (left @ right)).sum((1, 2)), values.sum(-1), rtol=0.05, atol=0.5)


def test_adam_is_that_of_torch():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    optimizer, oracle = Adam([ours]), torch.optim.Adam([theirs], lr=0.01, betas=(0.9, 0.98), eps=1e-12)
    for _ in range(20):
        gradient = torch.randn(5, 3)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step(0.01)
        oracle.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_muon_moves_against_the_gradient_by_an_orthogonal_step():
    parameter = torch.nn.Parameter(torch.zeros(16, 16))
    parameter.grad = torch.diag(torch.linspace(0.1, 2.0, 16))
    Muon([parameter], weight_decay=0.0).step(0.1)
    assert (parameter.detach().diag() < -0.05).all()
    assert torch.linalg.matrix_norm(parameter.detach(), 2) < 0.14


def test_states_are_restored():
    torch.manual_seed(0)
    gradients = torch.randn(6, 8, 8)

    def trained(restart):
        parameter = torch.nn.Parameter(torch.eye(8))
        muon, adam = Muon([parameter]), Adam([parameter])
        for step, gradient in enumerate(gradients):
            if step == restart:
                states = muon.state_dict(), adam.state_dict()
                muon, adam = Muon([parameter]), Adam([parameter])
                muon.load_state_dict(states[0])
                adam.load_state_dict(states[1])
            parameter.grad = gradient.clone()
            muon.step(0.01)
            adam.step(0.01)
        return parameter

    assert torch.equal(trained(restart=None), trained(restart=3))
