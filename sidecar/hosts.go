package sidecar

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"go.uber.org/zap"

	"lookaside/ipc/hosts"
	"lookaside/sidecar/settings"
)

// hostsAddr is the file in runtime.dir with the host:port where schedulers of other hosts are
// accepted. Workers read it, and tell their scheduler.
const hostsAddr = "hosts.addr"

// openHosts begins to carry sessions to and from other hosts, if the settings want it.
func (d *Daemon) openHosts() (err error) {
	c := &d.cfg.Hosts
	if err := removeHostsAddr(d.listener.Dir()); err != nil { // of a sidecar that was killed
		return err
	}
	if !c.Enabled() {
		return nil
	}
	log := d.log.Named("hosts")
	opt := hosts.Options{Listen: c.Listen, Connections: c.Connections, Log: log}
	if opt.Token, err = settings.ReadToken("hosts.token_file", c.TokenFile, log); err != nil {
		return err
	}
	if opt.Answer, opt.Call, err = hostsTLS(c); err != nil {
		return err
	}
	if d.hosts, err = hosts.Start(d.listener, opt); err != nil {
		return err
	}
	addr := d.hosts.Addr()
	if addr == "" {
		return nil
	}
	path := filepath.Join(d.listener.Dir(), hostsAddr)
	if err := os.WriteFile(path+".new", []byte(addr+"\n"), 0o600); err != nil {
		return fmt.Errorf("hosts.listen: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("hosts.listen: %w", err)
	}
	log.Info("accepting schedulers of other hosts", zap.String("address", addr),
		zap.Bool("tls", opt.Answer != nil), zap.Bool("token", opt.Token != ""),
		zap.Bool("client_certificates", c.ClientCAFile != ""))
	if opt.Answer == nil && c.TokenFile != "" {
		log.Warn("what is said to schedulers of other hosts is not encrypted: set hosts.cert_file and hosts.key_file, unless nobody else can read or change packets on that network")
	}
	return nil
}

// closeHosts ends all sessions with other hosts. It may be called again.
func (d *Daemon) closeHosts() error {
	if d.hosts == nil {
		return nil
	}
	err := errors.Join(d.hosts.Close(), removeHostsAddr(d.listener.Dir()))
	d.hosts = nil
	return err
}

func removeHostsAddr(dir string) error {
	err := os.Remove(filepath.Join(dir, hostsAddr))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// hostsTLS returns how hosts.listen is served and how other hosts are called; nil: without TLS.
func hostsTLS(c *settings.HostsConfig) (answer, call *tls.Config, err error) {
	if c.CertFile == "" && c.CAFile == "" {
		return nil, nil, nil
	}
	call = &tls.Config{MinVersion: tls.VersionTLS13, ServerName: c.ServerName}
	if c.CAFile != "" {
		if call.RootCAs, err = certificates("hosts.ca_file", c.CAFile); err != nil {
			return nil, nil, err
		}
	}
	if c.CertFile == "" {
		return nil, call, nil
	}
	pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err != nil {
		return nil, nil, fmt.Errorf("hosts.cert_file, hosts.key_file: %w", err)
	}
	call.Certificates = []tls.Certificate{pair}
	answer = &tls.Config{MinVersion: tls.VersionTLS13, Certificates: call.Certificates,
		// A ticket would let a caller in whose certificate has ended meanwhile.
		SessionTicketsDisabled: true}
	if c.ClientCAFile != "" {
		answer.ClientAuth = tls.RequireAndVerifyClientCert
		answer.ClientCAs, err = certificates("hosts.client_ca_file", c.ClientCAFile)
	}
	return answer, call, err
}

// certificates reads the certificates in a file that a setting names.
func certificates(setting, file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", setting, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s: no certificate in %s", setting, file)
	}
	return pool, nil
}
