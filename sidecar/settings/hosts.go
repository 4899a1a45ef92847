package settings

import (
	"errors"
	"fmt"
	"net"
	"strconv"
)

// HostsConfig configures sessions with other hosts, for engines whose ranks are on several.
type HostsConfig struct {
	Listen       string // empty: no scheduler of another host is accepted
	Connections  int
	TokenFile    string
	CertFile     string
	KeyFile      string
	CAFile       string
	ClientCAFile string
	ServerName   string
}

var hostsSettings = []Setting{
	{
		Key: "hosts.listen", Default: "", Unit: "host:port",
		Meaning: "Where schedulers of other hosts are accepted, for an engine whose ranks are on several hosts (docs/deployment.md). Unset: nowhere. Unless the address is a loopback one, a token or certificates of clients are demanded: hosts.token_file, hosts.client_ca_file.",
		set: checked(checkHostPort,
			func(c *Config) *string { return &c.Hosts.Listen }),
	},
	{
		Key: "hosts.connections", Default: "16", Unit: "sessions",
		Meaning: "How many sessions of schedulers of other hosts are accepted at a time, and how many sessions with other hosts are carried for schedulers of this one. Those that are accepted count toward sessions.limit too.",
		set:     whole(1, 1024, func(c *Config) *int { return &c.Hosts.Connections }),
	},
	{
		Key: "hosts.token_file", Default: "", Unit: "file",
		Meaning: "A file with a token that the sidecars of all hosts of an engine share. Each proves to the other that it knows it; it is never sent. Without TLS it keeps strangers out, but what is said can be read and changed by whoever can read and change the network's packets.",
		set:     text(func(c *Config) *string { return &c.Hosts.TokenFile }),
	},
	{
		Key: "hosts.cert_file", Default: "", Unit: "PEM file",
		Meaning: "This sidecar's certificate. With it hosts.listen speaks TLS, and it is shown to other hosts' sidecars that ask for one. Needs hosts.key_file.",
		set:     text(func(c *Config) *string { return &c.Hosts.CertFile }),
	},
	{
		Key: "hosts.key_file", Default: "", Unit: "PEM file", Meaning: "The key of hosts.cert_file.",
		set: text(func(c *Config) *string { return &c.Hosts.KeyFile }),
	},
	{
		Key: "hosts.ca_file", Default: "", Unit: "PEM file",
		Meaning: "Certificates of the authorities that other hosts' sidecars are checked by. With it, or with hosts.cert_file, they are spoken to by TLS. Unset: the system's authorities.",
		set:     text(func(c *Config) *string { return &c.Hosts.CAFile }),
	},
	{
		Key: "hosts.client_ca_file", Default: "", Unit: "PEM file",
		Meaning: "Certificates of the authorities that must have signed the certificate of whoever connects to hosts.listen. Unset: none is asked for. Needs hosts.cert_file.",
		set:     text(func(c *Config) *string { return &c.Hosts.ClientCAFile }),
	},
	{
		Key: "hosts.server_name", Default: "", Unit: "name",
		Meaning: "The name that the certificates of other hosts' sidecars must have, if one certificate serves all of them. Unset: the host's name or address that is connected to.",
		set:     text(func(c *Config) *string { return &c.Hosts.ServerName }),
	},
}

func checkHostPort(v string) error {
	if v == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(v)
	if err != nil {
		return err
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("%q is not a port", port)
	}
	return nil
}

// Enabled reports whether sessions with other hosts are accepted or carried.
func (c *HostsConfig) Enabled() bool {
	return c.Listen != "" || c.TokenFile != "" || c.CertFile != "" || c.CAFile != ""
}

// check refuses files without those that they need, and a listener that anybody could use.
func (c *HostsConfig) check() error {
	switch {
	case (c.CertFile == "") != (c.KeyFile == ""):
		return errors.New("hosts.cert_file and hosts.key_file: set both or neither")
	case c.ClientCAFile != "" && c.CertFile == "":
		return errors.New("hosts.client_ca_file is set, and hosts.cert_file is not: without TLS no certificate is asked for")
	case c.ServerName != "" && c.CAFile == "" && c.CertFile == "":
		return errors.New("hosts.server_name is set, and neither hosts.ca_file nor hosts.cert_file: without TLS there is no certificate with a name")
	}
	if c.Listen == "" || c.TokenFile != "" || c.ClientCAFile != "" {
		return nil
	}
	host, _, _ := net.SplitHostPort(c.Listen)
	if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
		return nil
	}
	return fmt.Errorf("hosts.listen %s lets anybody in who can reach it: set hosts.token_file, or hosts.client_ca_file with hosts.cert_file and hosts.key_file, or listen on a loopback address", c.Listen)
}
