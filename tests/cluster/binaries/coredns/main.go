// CoreDNS with the parts that the test cluster's Corefile names: all of its plug-ins bring the libraries of several clouds,
// which take minutes to compile.
package main

import (
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"

	"github.com/coredns/coredns/coremain"
)

func main() { coremain.Run() }
