package hosts

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"

	"lookaside/ipc/wire"
)

// refused is a wire.Refuse as an error: what the other end, or this one, has to say to the user.
type refused struct{ wire.Refuse }

func (r *refused) Error() string { return r.Code + ": " + r.Message }

func refuse(code, field, format string, args ...any) *refused {
	return &refused{wire.Refuse{Code: code, Field: field, Message: fmt.Sprintf(format, args...)}}
}

func refuseVersion(got uint64) *refused {
	return &refused{wire.Refuse{Code: wire.RefuseVersion, Field: "version",
		Want: strconv.Itoa(wire.Version), Got: strconv.FormatUint(got, 10),
		Message: "the sidecars of the two hosts are of different releases: install one release on all hosts"}}
}

// nonce returns a fresh random number.
func nonce() []byte {
	b := make([]byte, wire.NonceBytes)
	_, _ = rand.Read(b) // never fails
	return b
}

// binding returns a value that only the two ends of a TLS connection know, or nothing for a
// connection without TLS.
func binding(c net.Conn) ([]byte, error) {
	t, ok := c.(*tls.Conn)
	if !ok {
		return nil, nil
	}
	state := t.ConnectionState()
	return state.ExportKeyingMaterial("EXPORTER-lookaside-token", nil, 32)
}

// greetings is what both ends need for the handshake of a TCP connection.
type greetings struct {
	token   string
	conn    net.Conn
	frames  *frames
	binding []byte
	proof   wire.HostsProof
	nonce   []byte // the challenge's
}

func (g *greetings) send(m wire.Message) error {
	_, err := g.conn.Write(appendFrame(nil, onGreeting, m.Append(nil)))
	return err
}

// receive receives m, or returns the *refused that came instead.
func (g *greetings) receive(m wire.Message) error {
	b, err := g.frames.on(onGreeting, greetingBytes)
	if err != nil {
		return err
	}
	if t, _ := wire.Peek(b); t == wire.TypeRefuse {
		r := new(refused)
		if err := r.Decode(b, &wire.DefaultLimits); err != nil {
			return err
		}
		return r
	}
	err = m.Decode(b, &wire.DefaultLimits)
	var v *wire.VersionError
	if errors.As(err, &v) {
		return refuseVersion(v.Got)
	}
	return err
}

// answer greets a caller, which has sent its preamble. It returns nil if the caller may open a
// session, and has sent a *refused to the caller if it returns one.
func (g *greetings) answer() error {
	err := g.challenge()
	var r *refused
	if errors.As(err, &r) {
		return errors.Join(err, g.send(&r.Refuse))
	}
	return err
}

func (g *greetings) challenge() (err error) {
	if g.binding, err = binding(g.conn); err != nil {
		return err
	}
	g.nonce = nonce()
	if err := g.send(&wire.HostsChallenge{Nonce: g.nonce, Token: g.token != ""}); err != nil {
		return err
	}
	if err := g.receive(&g.proof); err != nil {
		return err
	}
	accept := wire.HostsAccept{Proof: make([]byte, wire.ProofBytes)}
	switch p := &g.proof; {
	case g.token == "" && p.Token:
		return refuse(wire.RefuseDenied, "hosts.token_file",
			"the other host's sidecar has no token: set hosts.token_file there too")
	case g.token != "" && !p.Token:
		return refuse(wire.RefuseDenied, "hosts.token_file",
			"the other host's sidecar demands a token: set hosts.token_file to a file with the same token")
	case g.token != "" && !hmac.Equal(p.Proof, wire.ProofOf(g.token, wire.ByCaller, g.nonce,
		p.Nonce, g.binding)):
		return refuse(wire.RefuseDenied, "hosts.token_file",
			"the other host's sidecar has another token: hosts.token_file must have the same one on all hosts")
	case g.token != "":
		accept.Proof = wire.ProofOf(g.token, wire.ByAnswerer, g.nonce, p.Nonce, g.binding)
	}
	return g.send(&accept)
}

// call greets an answerer, after the preamble.
func (g *greetings) call() (err error) {
	if g.binding, err = binding(g.conn); err != nil {
		return err
	}
	var ch wire.HostsChallenge
	if err := g.receive(&ch); err != nil {
		return err
	}
	g.nonce = append(g.nonce[:0], ch.Nonce...)
	own := nonce()
	p := wire.HostsProof{Nonce: own, Token: g.token != "", Proof: make([]byte, wire.ProofBytes)}
	if p.Token && ch.Token {
		p.Proof = wire.ProofOf(g.token, wire.ByCaller, g.nonce, own, g.binding)
	}
	if err := g.send(&p); err != nil {
		return err
	}
	var a wire.HostsAccept
	if err := g.receive(&a); err != nil {
		return err
	}
	if g.token != "" && !hmac.Equal(a.Proof, wire.ProofOf(g.token, wire.ByAnswerer, g.nonce, own,
		g.binding)) {
		return refuse(wire.RefuseDenied, "hosts.token_file",
			"the other host's sidecar does not know the token of hosts.token_file")
	}
	return nil
}

// explain turns the failure of a call into what the scheduler's user should know.
func explain(address string, err error) *refused {
	var r *refused
	if errors.As(err, &r) {
		return r
	}
	var (
		unknown  x509.UnknownAuthorityError
		name     x509.HostnameError
		invalid  x509.CertificateInvalidError
		plain    tls.RecordHeaderError
		alert    *net.OpError
		notFound *net.DNSError
	)
	switch {
	case errors.As(err, &unknown):
		return refuse(wire.RefuseDenied, "hosts.ca_file",
			"the certificate of the sidecar at %s is signed by an authority that is not in hosts.ca_file: %v",
			address, err)
	case errors.As(err, &name):
		return refuse(wire.RefuseDenied, "hosts.server_name",
			"the certificate of the sidecar at %s is for another name: set hosts.server_name to a name in it, or issue it for this one: %v",
			address, err)
	case errors.As(err, &invalid):
		return refuse(wire.RefuseDenied, "hosts.cert_file",
			"the certificate of the sidecar at %s is not valid: %v", address, err)
	case errors.As(err, &plain):
		return refuse(wire.RefuseDenied, "hosts.cert_file",
			"the sidecar at %s does not speak TLS: set hosts.cert_file and hosts.key_file there, or unset hosts.ca_file and hosts.cert_file here",
			address)
	case errors.As(err, &alert) && alert.Op == "remote error": // a TLS alert
		return refuse(wire.RefuseDenied, "hosts.cert_file",
			"the sidecar at %s does not accept this sidecar's certificate: set hosts.cert_file and hosts.key_file to one that an authority in its hosts.client_ca_file has signed: %v",
			address, err)
	case errors.Is(err, errFrame), errors.Is(err, wire.ErrMalformed):
		return refuse(wire.RefuseUnreachable, "address",
			"what answers at %s is no sidecar: %v", address, err)
	case errors.Is(err, syscall.ECONNREFUSED):
		return refuse(wire.RefuseUnreachable, "address",
			"no sidecar answers at %s (connection refused): is hosts.listen set there?", address)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return refuse(wire.RefuseUnreachable, "address",
			"the sidecar at %s did not answer within %v", address, patience)
	case errors.As(err, &notFound):
		return refuse(wire.RefuseUnreachable, "address",
			"the host of %s has no address: set VLLM_HOST_IP there or lookaside.remote_endpoint: %v",
			address, err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF),
		errors.Is(err, syscall.ECONNRESET):
		return refuse(wire.RefuseUnreachable, "address",
			"the sidecar at %s closed the connection during the handshake", address)
	}
	return refuse(wire.RefuseUnreachable, "address", "the sidecar at %s cannot be reached: %v",
		address, err)
}
