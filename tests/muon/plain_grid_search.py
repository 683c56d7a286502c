"""The search for scales of grid formats told plainly: every candidate scale, every point of the grid."""

import torch

from memplan.muon.weights.grid_formats import grid_of


def plain_sub_scales(chosen, subs, search):
    """Return what ``GridFormat._sub_scales`` returns, ``(blocks, subs)``, by the distances to all points."""
    points = grid_of(chosen.name, subs.device).points
    largest = subs.amax(dim=2) / points.max()
    best, gain = torch.zeros_like(largest), torch.full_like(largest, -1)
    for candidate in range(search):
        scale = largest * (1.15 - 0.6 * candidate / (search - 1))
        groups = (subs / scale[:, :, None]).view(-1, chosen.group)
        scores = torch.addmm(points.square().sum(dim=1) / 2, groups, points.mT, beta=-1)
        nearest = points[scores.argmax(dim=1)].view(subs.shape)
        fit, square = (nearest * subs).sum(dim=2), nearest.square().sum(dim=2)
        better = fit.square() / square > gain
        gain = torch.where(better, fit.square() / square, gain)
        best = torch.where(better, fit / square, best)
    return best
