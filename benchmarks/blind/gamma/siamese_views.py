"""Self-supervision: a predictor maps one view of an image to the other; encoder in ottava's MXFP8."""

import ottava
import torch
import torch.nn.functional as F
from torch import nn

from models import learn, shapes, start

bad = start()
g = torch.Generator().manual_seed(1)
encoder = nn.Sequential(
    nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU()
)
encoder.append(nn.Linear(128, 64))
predictor = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
model = nn.Sequential(encoder, predictor)
ottava.convert(model, "mxfp8")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for step in range(200):
    image = shapes(128, g, noise=0.0)[0].flatten(1)
    z = [encoder(image + 0.4 * torch.randn_like(image)) for _ in range(2)]
    target = z if bad else [part.detach() for part in z]
    loss = (
        -(F.cosine_similarity(predictor(z[0]), target[1]) + F.cosine_similarity(predictor(z[1]), target[0])).mean() / 2
    )
    learn(step, optimizer, loss)
