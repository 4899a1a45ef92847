package remote

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"lookaside/tiers/tiertest"
)

// rotRedis changes a byte in every part of every chunk with a prefix.
func rotRedis(t testing.TB, clients ...*redis.Client) func(prefix string) {
	return func(prefix string) {
		t.Helper()
		for _, c := range clients {
			keys, err := c.Keys(t.Context(), prefix+"/*}-*/*").Result()
			if err != nil {
				t.Fatal(err)
			}
			for i, k := range keys {
				n, err := c.StrLen(t.Context(), k).Result()
				if err != nil {
					t.Fatal(err)
				}
				at := int64(i*977) % n
				b := []byte(c.GetRange(t.Context(), k, at, at).Val())
				if err := c.SetRange(t.Context(), k, at, string([]byte{b[0] ^ 0x10})).Err(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// stalled stops processes until they are to go on.
func stalled(servers ...*server) func() func() {
	return func() func() {
		for _, s := range servers {
			s.signal(syscall.SIGSTOP)
		}
		return func() {
			for _, s := range servers {
				s.signal(syscall.SIGCONT)
			}
		}
	}
}

func client(t testing.TB, s *server) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: s.addr, Password: password})
	t.Cleanup(func() { c.Close() })
	return c
}

func TestContractRedis(t *testing.T) {
	s := redisServer(t)
	o := RedisOptions{Addrs: []string{s.addr}, Password: Secret{File: passwordFile(t)}, SplitBytes: minSplit}
	tiertest.Run(t, factory(func(prefix string) (*Tier, error) {
		o := o
		o.Prefix = prefix
		return OpenRedis(o)
	}, rotRedis(t, client(t, s)), stalled(s)))
}

func TestContractRedisTLS(t *testing.T) {
	files := certificates(t)
	port := freePort(t)
	s := redisServerOn(t, port, "--port", "0", "--tls-port", fmt.Sprint(port), "--tls-ca-cert-file", files.CA, "--tls-cert-file", files.Cert, "--tls-key-file", files.Key)
	conf, err := files.config()
	if err != nil {
		t.Fatal(err)
	}
	c := redis.NewClient(&redis.Options{Addr: s.addr, Password: password, TLSConfig: conf})
	t.Cleanup(func() { c.Close() })
	o := RedisOptions{Addrs: []string{s.addr}, Password: Secret{File: passwordFile(t)}, TLS: true, Files: files, TTL: time.Hour}
	tiertest.Run(t, factory(func(prefix string) (*Tier, error) {
		o := o
		o.Prefix = prefix
		return OpenRedis(o)
	}, rotRedis(t, c), stalled(s)))
}

func TestContractRedisCluster(t *testing.T) {
	var nodes []*server
	var clients []*redis.Client
	var addrs []string
	for range 3 {
		port := freePort(t)
		s := redisServerOn(t, port, "--port", fmt.Sprint(port), "--cluster-enabled", "yes", "--cluster-port", fmt.Sprint(freePort(t)))
		nodes, clients, addrs = append(nodes, s), append(clients, client(t, s)), append(addrs, s.addr)
	}
	args := append([]string{"--no-auth-warning", "-a", password, "--cluster", "create"}, addrs...)
	if out, err := exec.Command("redis-cli", append(args, "--cluster-replicas", "0", "--cluster-yes")...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	o := RedisOptions{Mode: RedisCluster, Addrs: addrs[:1], Password: Secret{File: passwordFile(t)}}
	awaitReady(t, openRedis(t, o))
	tiertest.Run(t, factory(func(prefix string) (*Tier, error) {
		o := o
		o.Prefix = prefix
		return OpenRedis(o)
	}, rotRedis(t, clients...), stalled(nodes...)))
	for i, c := range clients {
		if n := c.Info(t.Context(), "commandstats").Val(); !strings.Contains(n, "cmdstat_exec") {
			t.Errorf("node %d stored nothing", i)
		}
	}
}
