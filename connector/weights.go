package connector

import (
	"cmp"
	"slices"

	"go.uber.org/zap"

	"lookaside/ipc/wire"
)

// EpochField is the field of a space that names an epoch of its weights. A space without it is of
// the weights that its field weights names.
const EpochField = "weights_epoch"

// EngineWeights describes the weights of the engine that one scheduler's session is of.
type EngineWeights struct {
	EngineID string
	Rank     uint32
	Space    string // short fingerprint
	Epoch    string // "" for the weights that the space's field weights names
}

// Weights returns the weights of the engines whose schedulers are connected, by engine and rank.
func (s *Server) Weights() []EngineWeights {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := []EngineWeights{}
	for _, ses := range s.sessions {
		if ses.role == wire.RoleScheduler {
			out = append(out, EngineWeights{ses.key.id, ses.key.rank,
				ses.space.fingerprint.Short(), ses.space.epoch()})
		}
	}
	slices.SortFunc(out, func(a, b EngineWeights) int {
		return cmp.Or(cmp.Compare(a.EngineID, b.EngineID), cmp.Compare(a.Rank, b.Rank))
	})
	return out
}

// epoch returns the name of the epoch that a space's weights are of.
func (sp *space) epoch() string {
	for _, f := range sp.hello.Fields {
		if f.Key == EpochField {
			return f.Value
		}
	}
	return ""
}

// NameWeights tells the schedulers of an engine what its weights are called, at most
// [wire.MaxEpochBytes] of UTF-8, and returns how many were told. They go on in that epoch's space
// when their engine next schedules a request.
func (s *Server) NameWeights(engineID, epoch string) (told int) {
	var to []*session
	s.mu.Lock()
	for _, ses := range s.sessions {
		if ses.role == wire.RoleScheduler && ses.key.id == engineID {
			to = append(to, ses)
		}
	}
	s.mu.Unlock()
	message := (&wire.NameWeights{Epoch: epoch}).Append(nil)
	for _, ses := range to {
		if err := ses.push(message); err != nil {
			ses.log.Debug("the name of weights was not delivered", zap.Error(err))
			continue
		}
		ses.log.Info("weights named", zap.String("epoch", epoch))
		told++
	}
	return told
}
