"""A knowledge graph by TransE: a margin loss, sparse rows under Adagrad with a rate of 0.3, rows put back on the sphere."""
import os

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
ENTITIES, RELATIONS, DIM, NEGATIVES, MARGIN = 600, 6, 24, 16, 4.0
place = F.normalize(torch.randn(ENTITIES, 4), dim=1)
move = 0.8 * torch.randn(RELATIONS, 4)


def triples():
    """The tails of a head are the four entities nearest to where the relation leads; heads have a long tail."""
    chance = 1.0 / torch.arange(1, ENTITIES + 1) ** 0.7
    head = torch.multinomial(chance, 12000, replacement=True)
    relation = torch.randint(RELATIONS, (12000,))
    near = torch.cdist(place[head] + move[relation], place).topk(4, largest=False).indices
    tail = near.gather(1, torch.randint(4, (12000, 1)))[:, 0]
    return torch.stack([head, relation, tail], 1).unique(dim=0)


facts = triples()
facts = facts[torch.randperm(len(facts))]
test, train = facts[:400], facts[400:]
print(f"{len(train)} facts for training, {len(train[:, 0].unique())} entities are a head")


class TransE(nn.Module):
    def __init__(self):
        super().__init__()
        self.entity = nn.Embedding(ENTITIES, DIM, sparse=True)
        self.relation = nn.Embedding(RELATIONS, DIM, sparse=True)
        nn.init.uniform_(self.relation.weight, -0.3, 0.3)
        self.project()

    @torch.no_grad()
    def project(self):
        self.entity.weight.copy_(F.normalize(self.entity.weight, dim=1))

    def forward(self, head, relation, tail):
        return 6.0 * (self.entity(head) + self.relation(relation) - self.entity(tail)).norm(dim=-1)


model = TransE()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3, lr_decay=3e-3)


@torch.no_grad()
def rank():
    """One minus the mean reciprocal rank of the right tail among all entities."""
    head, relation, tail = test.t()
    score = model(head[:, None], relation[:, None], torch.arange(ENTITIES)[None])
    place_of = (score < score.gather(1, tail[:, None])).sum(1) + 1
    return 1 - place_of.float().reciprocal().mean().item()


print("first loss %.4f" % rank())
for step in range(300):
    head, relation, tail = train[torch.randint(len(train), (256,))].t()
    wrong = torch.randint(ENTITIES, (256, NEGATIVES))
    good = model(head, relation, tail)
    bad = model(head[:, None], relation[:, None], wrong)
    share = (-bad).detach().softmax(1)  # self-adversarial: near ones count more
    loss = -F.logsigmoid(MARGIN - good).mean() - (share * F.logsigmoid(bad - MARGIN)).sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.project()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}, {rank():.3f}")
print("final loss %.4f" % rank())
