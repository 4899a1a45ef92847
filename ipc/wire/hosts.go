package wire

import (
	"crypto/hmac"
	"crypto/sha256"
)

// The messages that carry a scheduler's session to a sidecar of another host; see docs/protocol.md,
// "Other hosts". A scheduler sends Reach to the sidecar of its own host. That one, the caller,
// connects over TCP to the other sidecar, the answerer. Each of the two proves with a HostsProof
// that it knows the token that both were given, without sending it.

// NonceBytes is the length of the random numbers of a TCP connection's handshake.
const NonceBytes = 32

// Reach asks the sidecar for a session with a sidecar of another host. The Hello of the session
// follows it. The reply is a Welcome or a Refuse, as on the session socket.
type Reach struct {
	Version uint16 // written as [Version] when 0
	Address string // host:port where the other sidecar accepts schedulers of other hosts
}

func (m *Reach) fields(v *visitor) *visitor {
	v.begin(TypeReach)
	v.version(&m.Version)
	v.str("address", &m.Address, v.lim.TextBytes)
	v.check(m.Address != "", "address", "empty")
	return v
}

// HostsChallenge is the answerer's first message. It may send a Refuse instead.
type HostsChallenge struct {
	Version uint16 // written as [Version] when 0
	Nonce   []byte // NonceBytes long, random; aliases the input
	Token   bool   // the answerer has a token, and the caller must prove that it has the same
}

func (m *HostsChallenge) fields(v *visitor) *visitor {
	v.begin(TypeHostsChallenge)
	v.version(&m.Version)
	v.exactly("nonce", &m.Nonce, NonceBytes)
	v.flag("token", &m.Token)
	return v
}

// HostsProof answers a HostsChallenge.
type HostsProof struct {
	Nonce []byte // NonceBytes long, random; aliases the input
	Token bool   // the caller has a token, and the answerer must prove that it has the same
	// Proof is the caller's, see [ProofOf]; all zero without a token. Aliases the input.
	Proof []byte
}

func (m *HostsProof) fields(v *visitor) *visitor {
	v.begin(TypeHostsProof)
	v.exactly("nonce", &m.Nonce, NonceBytes)
	v.flag("token", &m.Token)
	v.exactly("proof", &m.Proof, ProofBytes)
	return v
}

// HostsAccept ends the handshake; the session's messages follow. The answerer may send a Refuse
// instead.
type HostsAccept struct {
	// Proof is the answerer's, see [ProofOf]; all zero without a token. Aliases the input.
	Proof []byte
}

func (m *HostsAccept) fields(v *visitor) *visitor {
	v.begin(TypeHostsAccept)
	v.exactly("proof", &m.Proof, ProofBytes)
	return v
}

// ProofBytes is the length of a proof.
const ProofBytes = sha256.Size

// Who proves that it knows the token.
const (
	ByCaller   = "lookaside caller"
	ByAnswerer = "lookaside answerer"
)

// ProofOf returns the HMAC-SHA256, keyed by the token, of who proves it, of both nonces, and of
// binding: a value of the TLS connection that both ends know, empty without TLS. It differs for
// each connection, so a proof that was seen is of no use, nor is one that was relayed to another
// TLS connection.
func ProofOf(token, by string, challenge, answer, binding []byte) []byte {
	mac := hmac.New(sha256.New, []byte(token))
	mac.Write([]byte(by))
	mac.Write(challenge)
	mac.Write(answer)
	mac.Write(binding)
	return mac.Sum(nil)
}
