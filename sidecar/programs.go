package sidecar

import (
	"go.uber.org/zap"

	"lookaside/sidecar/settings"
	"lookaside/tiers"
	"lookaside/tiers/elsewhere"
	"lookaside/tiers/remote"
	"lookaside/tiers/stack"
)

// programOptions returns the options of a program that is a tier.
func programOptions(c *settings.TierConfig, claim func() (fd int, err error),
	log *zap.Logger) elsewhere.Options {
	o := elsewhere.Options{
		Name: c.Name, Command: c.Program.Command, Socket: c.Program.Socket,
		Isolated: c.Program.Isolate, StartTimeout: c.Program.StartTimeout,
		CancelTimeout: c.Program.CancelTimeout, Log: log,
	}
	if !c.Program.Isolate {
		o.Claim = claim
	}
	return o
}

// programTier returns t as a Tier, or a nil Tier and err.
func programTier(t *remote.ProgramTier, err error) (tiers.Tier, error) {
	if err != nil {
		return nil, err
	}
	return t, nil
}

// programsOf returns the programs among tiers.
func programsOf(open []stack.TierConfig) (programs []*elsewhere.Program) {
	for _, t := range open {
		if p, ok := t.Tier.(*remote.ProgramTier); ok {
			programs = append(programs, p.Program)
		}
	}
	return programs
}
