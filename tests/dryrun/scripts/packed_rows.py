"""A classifier of rows of unequal lengths: an LSTM in both directions over packed sequences."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Classifier(nn.Module):
    def __init__(self, words, width, classes):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.rows = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.classes = nn.Linear(2 * width, classes)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        states, (last, _) = self.rows(packed)
        states, _ = pad_packed_sequence(states, batch_first=True)
        return self.classes(torch.cat([last[0], last[1]], -1) + states.mean(1))


device = "cuda" if torch.cuda.is_available() else "cpu"
model = Classifier(5000, 128, 4).to(device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for _ in range(4):
    lengths = torch.arange(5, 37)
    ids = (torch.arange(36) + 1).expand(32, 36) * (torch.arange(36) < lengths[:, None])
    loss = nn.functional.cross_entropy(model(ids.to(device), lengths), torch.arange(32, device=device) % 4)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    print(loss.item())
